"""A rank that fails alone over gloo: its peers hear of it at once, it waits for nobody, and the next step works.

Random programs of this are in ``test_interleavings.py``; here real processes do what is most usual.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    FleetParams,
    HandleParams,
    MoEEpConfigError,
    MoEEpPeerError,
    MoEEpTransportError,
)
from moefleet.transports.torch_dist import janitor
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, compute, made, routed, sent, step
from tests.strategies import Problem, make_problem
from tests.transports.torch_dist.ranks import caught, gloo_ranks

HOW = ("ids", "tokens", "update", "expert", "rows", "destroyed after sending", "destroyed")


def fails(ctx: RankContext, params: FleetParams, problem: Problem, how: str) -> Any:
    """Rank 1 fails in this way in the second of three steps, and then does nothing until the others have noticed."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    ys = [step(fleet, x, ids, weights)[1]]

    def spoiled() -> None:
        if how == "ids":
            routed(fleet, ids + 100, weights)
        handle = routed(fleet, ids, weights)
        if how == "tokens":
            handle.dispatch(sent(torch.zeros(len(x) + 1, x.shape[1])))
        if how == "update":
            handle.update(HandleParams(ids[:-1]))
        handle.dispatch_send_only(sent(x))
        if how == "destroyed after sending":
            handle.destroy()
            return
        out = handle.dispatch_recv_only()
        if how == "rows":
            handle.combine(made(compute(fleet, out)[..., :-1]))
        handle.destroy()  # "expert": what unwinding an exception does

    if ctx.rank == 1:
        error = caught(spoiled)
        ctx.meet("all have noticed")  # which takes nothing of rank 1
    else:
        error = caught(lambda: step(fleet, x, ids, weights))
        ctx.meet("all have noticed")
    ys.append(step(fleet, x, ids, weights)[1])
    return ys, error, fleet.stats()["failed_steps"]


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_fails_alone(how: str) -> None:
    problem = make_problem(0, 3, 5, 4, 2, [3, 2, 0])
    params = problem.params(EpLayout.RANK_MAJOR)
    by_rank = gloo_ranks()(fails, params, problem, how)
    for index in range(2):
        check_results(problem, params, [ys[index] for ys, _, _ in by_rank])
    for rank in (0, 2):
        error = by_rank[rank][1]
        assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
        assert f"rank 1 failed in step 2, {'dispatch' if how in HOW[:3] else 'combine'}: {error.reason}" == str(error)
        assert by_rank[rank][2] == 1
    alone = by_rank[1][1]
    if how in ("ids", "tokens", "update", "rows"):
        assert isinstance(alone, MoEEpConfigError) and by_rank[0][1].reason == str(alone)
    else:
        assert alone is None and "destroyed" in by_rank[0][1].reason


def leaves_early(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 0 is done with everything before the others begin."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    if ctx.rank == 0:
        handle = routed(fleet, ids, weights)
        handle.dispatch_send_only(sent(x))
        handle.destroy()
        fleet.destroy()
        ctx.bootstrap.tcp_store.set("rank 0 has left", "")
    else:
        ctx.bootstrap.tcp_store.wait(["rank 0 has left"])
    return [caught(lambda: step(fleet, x, ids, weights)) for _ in range(2)]


def test_destroying_waits_for_nobody_and_is_heard_of() -> None:
    problem = make_problem(0, 3, 5, 4, 2, [3, 2, 4])
    by_rank = gloo_ranks()(leaves_early, problem.params(), problem)
    assert all("was destroyed" in str(error) for error in by_rank[0])
    for first, second in by_rank[1:]:
        assert isinstance(first, MoEEpPeerError) and first.rank == 0 and "handle was destroyed" in first.reason
        assert isinstance(second, MoEEpPeerError | MoEEpTransportError), second


def leave_before_the_last_comes(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Ranks 0 and 1 fail alone and leave at the same time, while the group still waits for rank 2."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    patience, janitor._LAST_S = janitor._LAST_S, 0.05
    try:
        if ctx.rank == 2:
            ctx.meet("long ago")
            return caught(lambda: step(fleet, x, ids, weights))
        handle = routed(fleet, ids, weights)
        handle.dispatch_send_only(sent(x))
        handle.give_up(ZeroDivisionError(f"mistake of rank {ctx.rank}"))
        handle.destroy()
        fleet.destroy()
        for thread in threading.enumerate():
            if thread.name == "moefleet-janitor":
                thread.join(0.5)  # it goes on; one that does not wait for rank 2 would have ended by now
        ctx.meet("long ago")
        return None
    finally:
        janitor._LAST_S = patience


def test_the_last_to_come_hears_why_the_others_have_left() -> None:
    problem = make_problem(0, 3, 5, 4, 2, [3, 2, 4])
    error = gloo_ranks()(leave_before_the_last_comes, problem.params(), problem)[2]
    assert isinstance(error, MoEEpPeerError) and error.rank in (0, 1), error
    assert str(error) == f"rank {error.rank} failed in step 1, combine: ZeroDivisionError: mistake of rank {error.rank}"


def two_open(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Micro-batches: the first of two fails on rank 2 while the second is on its way."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    first, second = routed(fleet, ids, weights), routed(fleet, ids, weights)
    first.dispatch_send_only(sent(x))
    second.dispatch_send_only(sent(x))
    out = first.dispatch_recv_only()
    error = None
    if ctx.rank == 2:
        first.destroy()
    else:
        error = caught(lambda: first.combine(made(compute(fleet, out))))
    y = second.combine(made(compute(fleet, second.dispatch_recv_only()))).x
    return y, error, step(fleet, x, ids, weights)[1]


def test_a_failed_step_leaves_the_other_open_one_alone() -> None:
    problem = make_problem(0, 3, 5, 4, 2, [3, 2, 4])
    params = problem.params(EpLayout.FLAT)
    by_rank = gloo_ranks()(two_open, params, problem)
    for index in (0, 2):
        check_results(problem, params, [got[index] for got in by_rank])
    assert all(isinstance(error, MoEEpPeerError) and error.rank == 2 for _, error, _ in by_rank[:2])


def crossed(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 0 combines the first of two open steps, rank 1 the second."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handles = [routed(fleet, ids, weights) for _ in range(2)]
    outs = [handle.dispatch(sent(x)) for handle in handles]
    mine = ctx.rank
    error = caught(lambda: handles[mine].combine(made(compute(fleet, outs[mine]))))
    for handle in handles:
        handle.destroy()
    ctx.meet("both have raised")
    return error, step(fleet, x, ids, weights)[1]


def test_calls_in_another_order_are_named_on_both_sides() -> None:
    problem = make_problem(0, 2, 5, 4, 2, [3, 2])
    params = problem.params()
    by_rank = gloo_ranks()(crossed, params, problem, world=2)
    for rank, (error, _) in enumerate(by_rank):
        assert isinstance(error, MoEEpPeerError) and error.rank == 1 - rank
        assert "rank 0 in combine of step 1, rank 1 in combine of step 2" in str(error)
    check_results(problem, params, [y for _, y in by_rank])
