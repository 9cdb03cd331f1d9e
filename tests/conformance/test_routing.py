"""Which row goes where, and what comes home: any routing against the reference, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moefleet import EpLayout, FleetParams, HandleParams
from tests.conformance.comparing import check_results, check_step
from tests.conformance.context import NAN, RankContext, compute, made, received, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import SPECIALS, Problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def steps(ctx: RankContext, params: FleetParams, problems: list[Problem], int32: bool = False) -> list[Any]:
    """Each problem as one step of one Fleet."""
    fleet, out = ctx.fleet(params), []
    for problem in problems:
        x, ids, weights = ctx.mine(problem)
        out.append(step(fleet, x, ids.int() if int32 else ids, weights))
    return out


def run(ranks: Ranks, layout: EpLayout, problems: list[Problem], **changes: Any) -> None:
    """All problems over one Fleet that is large enough for each of them."""
    tokens = max(1, *(max(problem.tokens) for problem in problems))
    fields = {"max_tokens_per_rank": tokens, "max_topk": max(problem.topk for problem in problems), **changes}
    params = ranks.params(problems[0], layout, **fields)
    world = problems[0].world_size
    by_rank = ranks(steps, params, problems, world=world)
    for index, problem in enumerate(problems):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


@st.composite
def any_problem(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.integers(1, 4))
    return {
        "seed": draw(st.integers(0, 2**16)),
        "tokens": draw(st.lists(st.integers(0, 6), min_size=world, max_size=world)),
        "experts": draw(st.integers(1, 9)),
        "topk": draw(st.integers(1, 8)),
        "hidden": draw(st.sampled_from([1, 4, 5, 16])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "special": draw(st.sampled_from(SPECIALS)),
    }


@settings(
    max_examples=8 if torch.cuda.is_available() else 24,  # where each size has its kernels, which are compiled
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(arguments=any_problem(), int32=st.booleans())
def test_any_routing(ranks: Ranks, layout: EpLayout, arguments: dict[str, Any], int32: bool) -> None:
    """Absent slots (case 9), duplicates that add up (case 7), exact counts (case 11), routing past the counts that
    was stale (case 12), padding that was multiplied away and leaked NaN (case 14): all in one."""
    problem = ranks.problem(**arguments)
    params = problem.params(layout)
    assume(ranks.fits(params, problem.world_size))
    got = ranks(steps, params, [problem], int32, world=problem.world_size)
    check_step(problem, params, [each[0] for each in got], ranks.transport.has("canonical_order"))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_kind_of_routing(ranks: Ranks, layout: EpLayout, world: int) -> None:
    """Everything to one expert, which overflowed or was miscounted elsewhere (case 18), to one rank, to nobody, a few
    popular experts; K from 1 to 8; full batches and smaller ones after them over the same Fleet."""
    ranks.require_ranks(world)
    problems = []
    for seed, special in enumerate(SPECIALS * 2):
        tokens = [16] * world if seed % 2 else [(5 * rank + seed) % 9 for rank in range(world)]
        problems.append(ranks.problem(tokens, seed=seed, experts=7, topk=1 + seed % 8, special=special))
    run(ranks, layout, problems)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_types(ranks: Ranks, layout: EpLayout, dtype: torch.dtype) -> None:
    run(ranks, layout, [ranks.problem([6, 0, 3], seed=seed, dtype=dtype, topk=4) for seed in range(4)])


def small_numbers(ctx: RankContext, params: FleetParams, x: torch.Tensor, ids: Any, weights: Any) -> torch.Tensor:
    return step(ctx.fleet(params), ctx.put(x), ctx.put(torch.tensor(ids)), ctx.put(torch.tensor(weights)))[1]


def test_two_slots_of_one_expert_add_up(ranks: Ranks, layout: EpLayout) -> None:
    """A duplicate trapped the device, or only the last one's weight counted (case 7)."""
    problem = ranks.problem([1, 1], experts=4, topk=3)
    x = torch.arange(1, problem.hidden + 1).to(ranks.dtype)[None] / 4
    params = ranks.params(problem, layout)
    for y in ranks(small_numbers, params, x, [[0, 0, 1]], [[0.25, 0.5, 0.125]], world=2):
        assert torch.equal(y, x / 4), "(0.25 + 0.5) * x / 4 from expert 0 and 0.125 * x / 2 from expert 1"


def test_absent_slots_contribute_nothing(ranks: Ranks, layout: EpLayout) -> None:
    """A token whose slots are all -1 comes back exactly zero (case 9), whatever stands beside the -1: NaN times zero
    is NaN (case 14)."""
    problem = ranks.problem([3, 3], experts=4, topk=2)
    x = torch.ones(3, problem.hidden, dtype=ranks.dtype)
    x[0] = NAN
    ids, weights = [[-1, -1], [-1, 3], [2, -1]], [[NAN, float("inf")], [NAN, 0.5], [1.0, float("-inf")]]
    for y in ranks(small_numbers, ranks.params(problem, layout), x, ids, weights, world=2):
        assert y[:, 0].tolist() == [0.0, 0.5, 0.75]
        assert torch.equal(y, y[:, :1].expand_as(y))


def both_id_types(ctx: RankContext, params: FleetParams, problem: Problem) -> list[torch.Tensor]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    ys = [step(fleet, x, ids.to(dtype), weights)[1] for dtype in (torch.int64, torch.int32)]
    handle = routed(fleet, ids.flip(0), weights)
    for dtype in (torch.int32, torch.int64):
        handle.update(HandleParams(ids.to(dtype)))
        out = handle.dispatch(sent(x))
        ys.append(handle.combine(made(compute(fleet, out))).x)
    return ys


def test_int32_and_int64_ids_give_the_same_bits(ranks: Ranks, layout: EpLayout) -> None:
    """The id type was lost when a handle was made again (case 10)."""
    problem = ranks.problem([5, 3], topk=4)
    for first, *others in ranks(both_id_types, ranks.params(problem, layout), problem, world=2):
        for other in others:
            assert torch.equal(first, other)


def huge_then_small(ctx: RankContext, params: FleetParams, large: Problem, small: Problem) -> list[Any]:
    fleet = ctx.fleet(params)
    for _ in range(2):  # both buffer sets
        x, ids, weights = ctx.mine(large)
        with routed(fleet, ids, weights) as handle:
            out = handle.dispatch(sent(torch.full_like(x, 1e4)))
            out.expert_tensors.fill_(6e4)
            handle.combine(made(torch.full_like(out.expert_tensors, 6e4)))
    x, ids, weights = ctx.mine(small)
    got = []
    for _ in range(2):
        with routed(fleet, ids, weights) as handle:
            out = handle.dispatch(sent(x))
            first = received(out)
            got.append((first, handle.combine(made(compute(fleet, out))).x))
    return got


def test_what_an_earlier_step_left_behind_is_never_read(ranks: Ranks, layout: EpLayout) -> None:
    """Stale ids after the count were taken for valid experts (case 12); a scale was computed over stale rows (13)."""
    large = ranks.problem([8, 8, 8], topk=3, special="distinct")
    small = ranks.problem([1, 0, 2], seed=1, topk=3)
    params = ranks.params(large, layout)
    by_rank = ranks(huge_then_small, params, large, small)
    for index in range(2):
        check_step(small, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


def again(ctx: RankContext, params: FleetParams, problem: Problem) -> list[torch.Tensor]:
    """One problem on two Fleets, three times on each."""
    fleets = [ctx.fleet(params) for _ in range(2)]
    return [step(fleet, *ctx.mine(problem))[1] for fleet in fleets for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_inputs_give_the_same_bits(ranks: Ranks, layout: EpLayout, dtype: torch.dtype) -> None:
    problem = ranks.problem([40, 4, 17, 2], experts=9, topk=6, hidden=100, dtype=dtype)
    params = ranks.params(problem, layout)
    by_rank = ranks(again, params, problem, world=problem.world_size)
    for first, *others in by_rank:
        for other in others:
            assert torch.equal(first, other)
    check_results(problem, params, [ys[0] for ys in by_rank])
