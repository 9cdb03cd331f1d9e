"""Steps over gloo: the same bits as over shared memory, in as few collectives as there can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet import EpLayout, FleetParams, create_fleet, probe
from tests.conformance.comparing import check_step
from tests.conformance.context import RankContext, Received, step
from tests.strategies import LAYOUTS, Problem, make_problem
from tests.transports.torch_dist.ranks import gloo_ranks

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())


def steps(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> tuple[list[Any], dict[str, Any]]:
    fleet = ctx.fleet(params)
    return [step(fleet, *ctx.mine(problem)) for problem in problems], fleet.stats()


def over_both(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[list[Any]]:
    got = []
    for backend in ("torch_dist", "shm"):
        with create_fleet(replace(ctx.bootstrap, device="cpu"), params, backend=backend) as fleet:
            got.append([step(fleet, *ctx.mine(problem)) for problem in problems])
    return got


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_over_shared_memory(layout: EpLayout, dtype: torch.dtype) -> None:
    if not probe("shm").available:
        pytest.skip(probe("shm").reason)
    problems = [make_problem(seed, 3, 7, 12, 4, tokens, dtype) for seed, tokens in enumerate([(5, 0, 9), (2, 9, 9)])]
    params = problems[0].params(layout, max_tokens_per_rank=9)
    for mine, theirs in gloo_ranks()(over_both, params, problems):
        for (received, y), (other, want) in zip(mine, theirs, strict=True):
            assert torch.equal(y, want)
            for part, same in zip(existing(received, layout), existing(other, layout), strict=True):
                assert torch.equal(part, same)


def existing(got: Received, layout: EpLayout) -> list[torch.Tensor]:
    """What was received, without rows past the counts."""
    fixed = [part for part in (got.ids, got.weights, got.counts, got.total) if part is not None]
    if layout is EpLayout.FLAT:
        return [*fixed, got.rows[: int(got.total)]]
    return [*fixed, *(block[:count] for block, count in zip(got.rows, got.counts.tolist(), strict=True))]


@layouts
def test_amounts_that_change(layout: EpLayout) -> None:
    """Rows travel with the status where that is large enough, else by themselves, or partly so."""
    amounts = [(1, 1, 1), (40, 40, 40), (40, 40, 40), (2, 40, 0), (0, 0, 0), (40, 1, 1), (3, 3, 3), (40, 0, 40)]
    problems = [make_problem(seed, 3, 5, 64, 3, tokens) for seed, tokens in enumerate(amounts)]
    params = problems[1].params(layout)
    by_rank = gloo_ranks()(steps, params, problems)
    for index, problem in enumerate(problems):
        check_step(problem, params, [got[index] for got, _ in by_rank], canonical=True)


def test_a_steady_step_takes_two_collectives() -> None:
    problem = make_problem(0, 3, 6, 64, 3, [9, 8, 9])
    params = problem.params(EpLayout.RANK_MAJOR)
    for _, stats in gloo_ranks()(steps, params, [problem] * 10):
        # The first dispatch is larger than anything before it: its rows and their routing follow the round.
        assert stats["collectives"] == 10 * 2 + 2
        assert stats["steps"] == 10


def test_a_large_step_takes_four_and_no_padding() -> None:
    problem = make_problem(0, 2, 2, 65536, 1, [20, 20], special="one_rank")  # 5 MB to one rank, nothing to the other
    params = problem.params(EpLayout.FLAT)
    for _, stats in gloo_ranks()(steps, params, [problem] * 4, world=2):
        assert stats["collectives"] == 4 * 4  # rows have one of their own, routing is with the status
        assert stats["carried_bytes"] < 4 * 20 * 65536 * 4 + 4 * 2 * 300_000


@layouts
def test_a_token_crosses_once_to_each_rank_that_serves_it(layout: EpLayout) -> None:
    problem = make_problem(3, 3, 9, 8, 6, [20, 0, 11], special="distinct")  # several experts of a rank for most tokens
    params = problem.params(layout)
    by_rank = [stats for _, stats in gloo_ranks()(steps, params, [problem, problem])]
    for rank, stats in enumerate(by_rank):
        owners = problem.topk_ids[rank] // 3
        served = [int((owners == peer).any(1).sum()) for peer in range(3)]
        assert stats["rows_sent"] == [2 * count for count in served]
        assert [other["rows_received"][rank] for other in by_rank] == [2 * count for count in served]
