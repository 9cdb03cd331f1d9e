"""Ranks that are stopped, die, leave or do not come: every wait ends, and names them where that can be known."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

from moefleet import (
    BootstrapConfig,
    FleetParams,
    MoEEpPeerError,
    MoEEpTimeoutError,
    create_fleet,
)
from moefleet.fleet.witness import _process
from moefleet.launch import launch
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, routed, sent, step
from tests.strategies import Problem, make_problem
from tests.transports.torch_dist.ranks import caught, gloo_ranks

PROBLEM = make_problem(0, 3, 5, 4, 2, [3, 2, 4])


def stopped(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 2 is stopped; the others give the step up; it is continued, and all go on."""
    ctx.meet("all are here")
    fleet, (x, ids, weights) = ctx.fleet(params, timeout_s=2.5), ctx.mine(problem)
    store, ys = ctx.bootstrap.tcp_store, [step(fleet, x, ids, weights)[1]]
    ctx.meet("all have stepped")
    if ctx.rank == 2:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    error = caught(lambda: step(fleet, x, ids, weights))
    if ctx.rank != 2 and store.add("gave up", 1) == 2:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    ctx.meet("all are awake")
    ys.append(step(fleet, x, ids, weights)[1])
    return ys, error


def test_a_stopped_rank_is_named_and_may_go_on() -> None:
    params = PROBLEM.params()
    by_rank = gloo_ranks()(stopped, params, PROBLEM)
    for rank in (0, 1):
        error = by_rank[rank][1]
        assert isinstance(error, MoEEpTimeoutError) and error.ranks == (2,), error
        assert "2.5 s (BootstrapConfig.timeout_s)" in str(error)
        assert "rank 2: its process is stopped" in str(error) and "waits there too" in str(error)
    late = by_rank[2][1]
    assert isinstance(late, MoEEpPeerError) and late.rank in (0, 1) and "nothing for 2.5 s" in late.reason, late
    for index in range(2):
        check_results(PROBLEM, params, [ys[index] for ys, _ in by_rank])


def killed(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    fleet, mine = ctx.fleet(params), ctx.mine(problem)
    step(fleet, *mine)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [caught(lambda: step(fleet, *mine)) for _ in range(2)]


def test_a_killed_rank_is_named() -> None:
    results = gloo_ranks().outcomes(killed, PROBLEM.params(), PROBLEM)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        for error in results[rank].value:  # a group that broke stays broken
            assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
            assert "rank 1: its process has ended" in str(error) and "a collective needs all ranks" in str(error)


def does_not_come(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    ctx.meet("all are here")
    fleet, mine = ctx.fleet(params, timeout_s=2.0), ctx.mine(problem)
    ctx.meet("built")
    error = None if ctx.rank == 0 else caught(lambda: step(fleet, *mine))
    ctx.meet("all have given up")
    return error


def test_a_rank_that_does_not_come_is_named() -> None:
    _, *errors = gloo_ranks()(does_not_come, PROBLEM.params(), PROBLEM)
    for error in errors:
        assert isinstance(error, MoEEpTimeoutError) and error.ranks == (0,), error
        assert "rank 0: nothing is known" in str(error)


def ends_in_a_step(bootstrap: BootstrapConfig, params: FleetParams, problem: Problem) -> bool:
    """Rank 0's process ends in the middle of a step, without a word, while rank 1 watches it."""
    store = bootstrap.tcp_store
    fleet = create_fleet(replace(bootstrap, device="cpu"), params, backend="torch_dist")
    KEPT.append(fleet)
    if bootstrap.rank == 0:
        store.set("pid", str(os.getpid()))
        handle = routed(fleet, problem.topk_ids[0], problem.topk_weights[0])
        handle.dispatch_send_only(sent(problem.xs[0]))
        KEPT.append(handle)
        return True
    pid, end = int(store.get("pid")), time.monotonic() + 30
    while _process(pid)[0] not in "ZX":
        assert time.monotonic() < end, "rank 0 does not end"
        time.sleep(0.01)
    return True


KEPT: list[Any] = []


def fleets(ctx: RankContext, params: FleetParams, problem: Problem) -> list[int]:
    """Fleets one after the other, in which steps fail and handles are forgotten: what is open after each of them."""
    open_files = []
    for _ in range(6):
        fleet = ctx.fleet(params)
        ctx.fleets.clear()
        for _ in range(3):
            handle = routed(fleet, problem.topk_ids[ctx.rank], problem.topk_weights[ctx.rank])
            handle.dispatch_send_only(sent(problem.xs[ctx.rank]))
            if ctx.rank != 1:
                caught(handle.dispatch_recv_only)
            handle.destroy()
        fleet.destroy()
        fleet.destroy()
        ctx.meet(f"fleet {len(open_files)}")
        end = time.monotonic() + 10
        while threading.active_count() > 2 and time.monotonic() < end:  # the pool's watch, and janitors
            time.sleep(0.01)
        open_files.append(len(os.listdir("/proc/self/fd")))
    return open_files


def test_fleets_leave_nothing_open() -> None:
    for first, *later in gloo_ranks()(fleets, PROBLEM.params(), PROBLEM):
        assert max(later) <= first


def test_a_process_ends_in_the_middle_of_a_step() -> None:
    problem = make_problem(0, 2, 5, 4, 2, [3, 2])
    results = launch(ends_in_a_step, 2, args=(problem.params(), problem), timeout_s=60, threads_per_rank=1)
    assert [(result.error, result.value, result.exitcode) for result in results] == [(None, True, 0)] * 2
