"""The end of a Fleet: explicit, at any moment, once or twice, and nobody waits for it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    EpLayout,
    FleetParams,
    HandleParams,
    MoEEpError,
    MoEEpPeerError,
    create_fleet,
)
from moefleet.launch import launch
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, compute, enter, made, received, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


def used_after(ctx: RankContext, params: FleetParams, problem: Problem) -> list[str]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    idle, opened = routed(fleet, ids, weights), routed(fleet, ids, weights)
    out = opened.dispatch(sent(x))
    rows = compute(fleet, out)
    ctx.meet("all have dispatched")
    for _ in range(3):
        fleet.destroy()
    told = []
    for call in (
        lambda: routed(fleet, ids, weights),
        lambda: idle.dispatch(sent(x)),
        lambda: idle.update(HandleParams(ids)),
        lambda: opened.combine(made(rows)),
    ):
        with pytest.raises(MoEEpError) as caught:
            call()
        told.append(str(caught.value))
    idle.destroy(), opened.destroy(), opened.complete(), opened.destroy()
    assert fleet.params == params and fleet.bootstrap.rank == ctx.rank
    fleet.destroy()
    return told


def test_use_after_destroy(ranks: Ranks, layout: EpLayout) -> None:
    """Teardown hung or crashed (case 27): here with a handle that is idle and one in the middle of a step."""
    problem = ranks.problem([3, 0, 2])
    for told in ranks(used_after, ranks.params(problem, layout), problem):
        assert all("destroyed" in text for text in told), told


def kept(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle = routed(fleet, ids, weights)
    out = handle.dispatch(sent(x))
    before, y = received(out), handle.combine(made(compute(fleet, out))).x
    fleet.destroy()
    ctx.fleets.clear()
    del fleet, handle
    gc.collect()
    return y, out.expert_tensors.shape == before.rows.shape, out.expert_tensors.sum() is not None


def test_results_and_views_outlive_the_fleet(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([3, 0, 2])
    params = ranks.params(problem, layout)
    check_results(problem, params, [y for y, _, _ in ranks(kept, params, problem)])


def one_leaves(ctx: RankContext, params: FleetParams, problem: Problem, when: str) -> Any:
    """Rank 1 takes its Fleet down; the others find out in their next wait for it."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    y = step(fleet, x, ids, weights)[1]
    if ctx.rank == 1:
        if when == "in a step":
            routed(fleet, ids, weights).dispatch(sent(x))
        fleet.destroy()
        ctx.meet("both found out")
        return y, None
    with pytest.raises(MoEEpError) as caught:
        step(fleet, x, ids, weights)
    ctx.meet("both found out")
    return y, caught.value


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_rank_that_leaves_is_named(ranks: Ranks, layout: EpLayout, when: str) -> None:
    ranks.require("peer_errors")
    problem = ranks.problem([3, 4, 2])
    params = ranks.params(problem, layout)
    by_rank = ranks(one_leaves, params, problem, when)
    check_results(problem, params, [y for y, _ in by_rank])
    for rank in {*range(ranks.world)} - {1}:
        error = by_rank[rank][1]
        assert isinstance(error, MoEEpPeerError) and error.rank == 1 and "rank 1" in str(error), error


def forgotten(ctx: RankContext, params: FleetParams, problem: Problem) -> torch.Tensor:
    """Fleets that nobody destroys: one is collected, one is still referenced when the interpreter ends."""
    for _ in range(2):
        fleet = create_fleet(ctx.bootstrap, params, backend=ctx.transport)
        y = step(fleet, *ctx.mine(problem))[1]
    gc.collect()
    KEPT.append(fleet)
    return y


KEPT: list[Any] = []


def at_the_end(bootstrap: BootstrapConfig, transport: str, device: str, *args: Any) -> Any:
    return enter(bootstrap, forgotten, transport, device, args)


def test_processes_end_without_destroy(ranks: Ranks) -> None:
    """Nothing collective happens at interpreter exit: ranks that forgot to destroy end all the same (case 27)."""
    problem = ranks.problem([3, 2])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    call = (ranks.transport.name, ranks.device, params, problem)
    results = launch(at_the_end, 2, args=call, timeout_s=60.0, threads_per_rank=1)
    assert [(result.error, result.exitcode) for result in results] == [(None, 0)] * 2
    check_results(problem, params, [result.value for result in results])
