"""Steps side by side: two open at once, micro-batches, several Fleets, and a slow reader."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    Fleet,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpPeerError,
)
from tests.conformance.comparing import check_results, check_step
from tests.conformance.context import RankContext, Received, compute, made, received, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem

Step = tuple[Received, torch.Tensor]


def two_open(ctx: RankContext, params: FleetParams, problems: list[Problem], reverse: bool) -> list[Step]:
    """Pairs of micro-batches: both dispatched, then both combined, in the same or in the other order."""
    fleet, got = ctx.fleet(params), []
    for first, second in zip(problems[::2], problems[1::2], strict=True):
        handles = [routed(fleet, *ctx.mine(problem)[1:]) for problem in (first, second)]
        outs = [h.dispatch(sent(ctx.mine(p)[0])) for h, p in zip(handles, (first, second), strict=True)]
        arrived = [received(out) for out in outs]
        ys: list[Any] = [None, None]
        for index in (1, 0) if reverse else (0, 1):
            ys[index] = handles[index].combine(made(compute(fleet, outs[index]))).x
            handles[index].destroy()
        got += zip(arrived, ys, strict=True)
    return got


def in_halves(ctx: RankContext, params: FleetParams, problems: list[Problem], reverse: bool) -> list[Step]:
    """All sending halves before any receiving half, with the handles updated from pair to pair."""
    fleet, got = ctx.fleet(params), []
    handles = [routed(fleet, *ctx.mine(problem)[1:]) for problem in problems[:2]]
    for pair in zip(problems[::2], problems[1::2], strict=True):
        inputs = [ctx.mine(problem) for problem in pair]
        for handle, (x, ids, weights) in zip(handles, inputs, strict=True):
            handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
            handle.dispatch_send_only(sent(x))
        order = (1, 0) if reverse else (0, 1)
        outs: list[Any] = [None, None]
        for index in order:
            outs[index] = handles[index].dispatch_recv_only()
        arrived = [received(out) for out in outs]
        for index in (0, 1):
            handles[index].combine_send_only(made(compute(fleet, outs[index])))
        ys: list[Any] = [None, None]
        for index in order:
            ys[index] = handles[index].combine_recv_only().x
        got += zip(arrived, ys, strict=True)
    return got


@pytest.mark.parametrize("reverse", [False, True], ids=["in_order", "other_order"])
@pytest.mark.parametrize("how", [two_open, in_halves])
def test_two_open_steps(ranks: Ranks, layout: EpLayout, how: Any, reverse: bool) -> None:
    if how is in_halves:
        ranks.require("halves")
    problems = [ranks.problem([4, 0, 5], seed=seed, topk=3) for seed in range(8)]
    params = ranks.params(problems[0], layout)
    by_rank = ranks(how, params, problems, reverse)
    for index, problem in enumerate(problems):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


def third_open(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handles = [routed(fleet, ids, weights) for _ in range(3)]
    got, told = [], []
    for _ in range(3):
        outs = [handle.dispatch(sent(x)) for handle in handles[:2]]
        for _ in range(2):
            with pytest.raises(MoEEpConfigError) as caught:
                handles[2].dispatch(sent(x))
            told.append(str(caught.value))
        arrived = [received(out) for out in outs]
        got.append((arrived[0], handles[0].combine(made(compute(fleet, outs[0]))).x))
        third = handles[2].dispatch(sent(x))  # now there is room
        got.append((arrived[1], handles[1].combine(made(compute(fleet, outs[1]))).x))
        first = received(third)
        got.append((first, handles[2].combine(made(compute(fleet, third))).x))
    return told, got


def test_a_third_open_step_is_refused_on_all_ranks_alike(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([4, 3, 0], topk=3)
    params = ranks.params(problem, layout)
    by_rank = ranks(third_open, params, problem)
    for told, _ in by_rank:
        assert all("at most 2 steps" in text for text in told)
    for index in range(9):
        got = [steps[index] for _, steps in by_rank]
        check_step(problem, params, got, ranks.transport.has("canonical_order"))


def several_fleets(ctx: RankContext, all_params: list[FleetParams], problems: list[list[Problem]]) -> list[list[Step]]:
    """Fleets side by side: a step on each in turn, and steps of all of them open at once."""
    fleets = [ctx.fleet(params) for params in all_params]
    got: list[list[Step]] = [[] for _ in fleets]
    for turn in range(len(problems[0])):
        if turn % 2:
            for index, fleet in enumerate(fleets):
                got[index].append(step(fleet, *ctx.mine(problems[index][turn])))
            continue
        opened = []
        for index, fleet in enumerate(fleets):
            x, ids, weights = ctx.mine(problems[index][turn])
            handle = routed(fleet, ids, weights)
            opened.append((handle, handle.dispatch(sent(x))))
        for index, (handle, out) in reversed(list(enumerate(opened))):
            first = received(out)
            got[index].append((first, handle.combine(made(compute(fleets[index], out))).x))
    return got


def test_several_fleets_in_the_same_ranks(ranks: Ranks) -> None:
    sizes = [
        dict(experts=5, hidden=4),
        dict(experts=2, hidden=8),
        dict(experts=9, hidden=12),
        dict(experts=3, hidden=4),
    ]
    layouts = [*EpLayout, EpLayout.EXPERT_MAJOR]
    problems = [[ranks.problem([3, 5, 0], seed=s, **size) for s in range(6)] for size in sizes]
    params = [ranks.params(some[0], layout) for some, layout in zip(problems, layouts, strict=True)]
    by_rank = ranks(several_fleets, params, problems)
    for index, some in enumerate(problems):
        for turn, problem in enumerate(some):
            got = [each[index][turn] for each in by_rank]
            check_step(problem, params[index], got, ranks.transport.has("canonical_order"))


def one_fleet_after_another(ctx: RankContext, params: FleetParams, problem: Problem) -> torch.Tensor:
    for _ in range(8):
        fleet = ctx.fleet(params)
        y = step(fleet, *ctx.mine(problem))[1]
        fleet.destroy()
    return y


def test_fleets_one_after_another(ranks: Ranks, layout: EpLayout) -> None:
    """Ranks reach the next construction while others are still taking the last Fleet down."""
    problem = ranks.problem([3, 1, 2])
    params = ranks.params(problem, layout)
    check_results(problem, params, ranks(one_fleet_after_another, params, problem))


def ahead(ctx: RankContext, params: FleetParams, problem: Problem, straight: bool) -> Any:
    """Rank 1 sends for the next two steps before rank 0 has read what came home in this one."""
    fleet = ctx.fleet(params, [FleetAlgoKnobFaultTolerance(timeout_ms=20_000)])
    x, ids, weights = ctx.mine(problem)
    got, faults = [], []
    for turn in range(3):
        handles = [routed(fleet, ids, weights) for _ in range(3)]
        out = handles[0].dispatch(sent(x))
        first, rows = received(out), compute(fleet, out)
        place = handles[0].combine_buffer() if straight else None
        handles[0].combine_send_only(made(rows if place is None else place.copy_(rows)))
        if ctx.rank == 0:
            ctx.meet(f"rank 1 is ahead, {turn}")
        got.append((first, handles[0].combine_recv_only().x))
        faults.append(fleet.query_fault())
        for handle in handles[1:]:
            handle.dispatch_send_only(sent(x))
        if ctx.rank != 0:
            ctx.meet(f"rank 1 is ahead, {turn}")
        for handle in handles[1:]:
            out = handle.dispatch_recv_only()
            first = received(out)
            got.append((first, handle.combine(made(compute(fleet, out))).x))
            faults.append(fleet.query_fault())
    ctx.meet("nobody has left before all have asked")
    return faults, got


@pytest.mark.parametrize("straight", [False, True], ids=["any_tensor", "combine_buffer"])
def test_a_rank_that_is_ahead_is_no_fault(ranks: Ranks, layout: EpLayout, straight: bool) -> None:
    ranks.require("halves")
    ranks.require("fault_tolerance")
    problem = ranks.problem([3, 4], topk=2)
    params = ranks.params(problem, layout)
    by_rank = ranks(ahead, params, problem, straight, world=2)
    assert [faults for faults, _ in by_rank] == [[False] * 9] * 2
    for index in range(9):
        check_step(problem, params, [got[index] for _, got in by_rank], ranks.transport.has("canonical_order"))


# When one step fails while another is open or still being read.


def attempt(fleet: Fleet, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    try:
        return step(fleet, x, ids, weights)
    except MoEEpError as error:
        return error


def one_of_two_fails(ctx: RankContext, params: FleetParams, problem: Problem, which: int) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handles = [routed(fleet, ids, weights) for _ in range(2)]
    outs = [handle.dispatch(sent(x)) for handle in handles]
    arrived = [received(out) for out in outs]
    got: list[Any] = [None, None]
    for index, handle in enumerate(handles):
        if ctx.rank == 1 and index == which:
            handle.destroy()
            continue
        try:
            got[index] = arrived[index], handle.combine(made(compute(fleet, outs[index]))).x
        except MoEEpError as error:
            got[index] = error
    return [*got, *(attempt(fleet, x, ids, weights) for _ in range(3))]


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_open_steps_fails(ranks: Ranks, layout: EpLayout, which: int) -> None:
    ranks.require("peer_errors")
    problem = ranks.problem([3, 4, 2], topk=2)
    params = ranks.params(problem, layout)
    by_rank = ranks(one_of_two_fails, params, problem, which)
    failed = [got.pop(which) for got in by_rank]
    assert failed[1] is None
    for error in failed[:1] + failed[2:]:
        assert isinstance(error, MoEEpPeerError) and error.rank == 1
    for index in range(4):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


def slow_reader(ctx: RankContext, params: FleetParams, problem: Problem, sends: bool) -> list[Any]:
    """Rank 0 has sent its part of a step and has not yet read the others', while rank 1 goes on and fails twice."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x))
        first = received(out)
        handle.combine_send_only(made(compute(fleet, out)))
        if ctx.rank == 0:
            ctx.meet("failed twice")
        got: list[Any] = [(first, handle.combine_recv_only().x)]
    for _ in range(2):
        if ctx.rank != 1:
            continue
        if sends:
            with routed(fleet, ids, weights) as handle:
                handle.dispatch_send_only(sent(x))
        else:
            with pytest.raises(MoEEpConfigError):
                routed(fleet, ids.float(), weights)
    if ctx.rank != 0:
        ctx.meet("failed twice")
    if ctx.rank != 1:
        got += [attempt(fleet, x, ids, weights) for _ in range(2)]
    return [*got, attempt(fleet, x, ids, weights), attempt(fleet, x, ids, weights)]


@pytest.mark.parametrize("sends", [False, True], ids=["before_sending", "after_sending"])
def test_failures_do_not_reach_back_into_a_finished_step(ranks: Ranks, layout: EpLayout, sends: bool) -> None:
    ranks.require("peer_errors")
    ranks.require("halves")
    problem = ranks.problem([3, 4, 2], topk=2)
    params = ranks.params(problem, layout)
    by_rank = ranks(slow_reader, params, problem, sends)
    for got in by_rank[:1] + by_rank[2:]:
        for error in got[1:3]:
            assert isinstance(error, MoEEpPeerError) and error.rank == 1
        del got[1:3]
    for index in range(3):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))
