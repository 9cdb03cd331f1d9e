"""Nothing to send, nothing to receive, and never the same amount: zero is a number like any other."""

from __future__ import annotations

import random
import time

import pytest
import torch

from moefleet import EpLayout, FleetParams
from tests.conformance.comparing import check_results, check_step
from tests.conformance.context import RankContext, Received, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


def steps(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[tuple[Received, torch.Tensor]]:
    fleet = ctx.fleet(params)
    return [step(fleet, *ctx.mine(problem)) for problem in problems]


def test_ranks_without_tokens(ranks: Ranks, layout: EpLayout) -> None:
    """A rank with no tokens was refused or crashed (case 1), needed padding from its caller (case 4), or its count of
    0 was taken for "unknown" and the padding computed (case 3)."""
    amounts = [(0, 4, 2), (0, 0, 0), (5, 0, 0), (0, 0, 1), (5, 5, 5), (0, 3, 0), (0, 0, 0), (1, 0, 5)]
    problems = [ranks.problem(tokens, seed=seed) for seed, tokens in enumerate(amounts)]
    params = ranks.params(problems[0], layout, max_tokens_per_rank=5)
    by_rank = ranks(steps, params, problems)
    for index, problem in enumerate(problems):
        got = [each[index] for each in by_rank]
        check_step(problem, params, got, ranks.transport.has("canonical_order"))
        assert [list(y.shape) for _, y in got] == [[count, problem.hidden] for count in problem.tokens]


@pytest.mark.parametrize("special", ["one_rank", "one_expert", "absent"])
def test_ranks_that_receive_nothing(ranks: Ranks, layout: EpLayout, special: str) -> None:
    """A rank that received nothing skipped the wait and the others hung (case 2); counts of 0 are exact (case 3)."""
    problems = [ranks.problem([4, 0, 3, 4], seed=seed, experts=6, special=special) for seed in range(3)]
    params = ranks.params(problems[0], layout)
    by_rank = ranks(steps, params, problems, world=problems[0].world_size)
    for index, problem in enumerate(problems):
        check_step(problem, params, [each[index] for each in by_rank], ranks.transport.has("canonical_order"))


def loop(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[torch.Tensor]:
    """No barrier between steps, and ranks that dawdle now and then."""
    fleet, moods, ys = ctx.fleet(params), random.Random(ctx.rank), []
    for problem in problems:
        if moods.random() < 0.05:
            time.sleep(0.002)
        ys.append(step(fleet, *ctx.mine(problem))[1])
    return ys


def test_idle_ranks_at_random_for_a_hundred_steps(ranks: Ranks, layout: EpLayout) -> None:
    """A rank without tokens skipped its launch, and the others spun for ever (case 6)."""
    dice = random.Random(1)
    problems = []
    for seed in range(100):
        tokens = [dice.choice([0, 0, dice.randint(0, 6)]) for _ in range(4)]
        problems.append(ranks.problem(tokens, seed=seed, experts=6, topk=2))
    idle = {tuple(count == 0 for count in problem.tokens) for problem in problems}
    assert len(idle) == 2 ** problems[0].world_size, "every set of ranks is idle at some time"
    params = ranks.params(problems[0], layout, max_tokens_per_rank=6)
    by_rank = ranks(loop, params, problems, world=problems[0].world_size)
    for index, problem in enumerate(problems):
        check_results(problem, params, [ys[index] for ys in by_rank])
