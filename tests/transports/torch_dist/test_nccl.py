"""The same over NCCL, with tensors on GPUs: one rank for each of at most two."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    FleetParams,
    MoEEpPeerError,
    MoEEpTimeoutError,
    probe,
)
from tests.conformance.comparing import check_results, check_step
from tests.conformance.context import RankContext, compute, made, received, routed, sent, step
from tests.conformance.pool import shared_pool
from tests.conformance.ranks import Ranks
from tests.conformance.transports import Transport
from tests.strategies import LAYOUTS, Problem, make_problem
from tests.transports.torch_dist.ranks import caught
from tests.transports.torch_dist.test_failing_alone import fails
from tests.transports.torch_dist.test_steps import steps
from tests.transports.torch_dist.test_waiting import killed

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]
worlds = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.skipif(GPUS < 2, reason="needs 2"))])
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())


def nccl_ranks() -> Ranks:
    return Ranks(shared_pool(), Transport("torch_dist", probe("torch_dist")), "cuda", set())


@worlds
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amounts_that_change(layout: EpLayout, dtype: torch.dtype, world: int) -> None:
    amounts = [1, 40, 40, 0, 2, 40, 3]
    problems = [
        make_problem(seed, world, 5, 64, 3, [(tokens + 3 * seed * rank) % 41 for rank in range(world)], dtype)
        for seed, tokens in enumerate(amounts)
    ]
    params = problems[0].params(layout, max_tokens_per_rank=40)
    by_rank = nccl_ranks()(steps, params, problems, world=world)
    for index, problem in enumerate(problems):
        check_step(problem, params, [got[index] for got, _ in by_rank], canonical=True)


def many_ways(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Halves with two steps open, a stream of the caller's, and memory that goes back at once."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    scales = torch.arange(len(x) * 3, device=ctx.device, dtype=torch.float32).view(-1, 3)
    ys = []
    for _ in range(20):
        first, second = routed(fleet, ids, weights), routed(fleet, ids, weights)
        gone = x.clone()
        first.dispatch_send_only(sent(gone, scales))
        torch.cuda.current_stream().synchronize()
        gone.fill_(float("nan"))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            second.dispatch_send_only(sent(x, scales))
            out = first.dispatch_recv_only()
            assert out.expert_scales is not None and out.expert_scales.device == x.device
            got = received(out)
            first.combine_send_only(made(compute(fleet, out)))
            ys.append((got, first.combine_recv_only().x))
            torch.cuda.current_stream().synchronize()
        out = second.dispatch_recv_only()
        got = received(out)
        ys.append((got, second.combine(made(compute(fleet, out))).x))
    return ys, scales


@worlds
@layouts
def test_halves_streams_and_scales(layout: EpLayout, world: int) -> None:
    problem = make_problem(7, world, 5, 256, 3, [30, 17][:world])
    params = problem.params(layout, scale_bytes_per_token=12)
    by_rank = nccl_ranks()(many_ways, params, problem, world=world)
    scales = [scales for _, scales in by_rank]
    for index in range(40):
        check_step(problem, params, [ys[index] for ys, _ in by_rank], canonical=True, scales=scales)


def bad_ids(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    os.environ["MOEFLEET_CHECK"] = "0"
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    ids[0, 0], ids[1, 1] = 77, -5
    return step(fleet, x, ids, weights)[1], fleet.stats()["bad_ids"]


def test_ids_out_of_range_count_as_none() -> None:
    problem = make_problem(3, 1, 5, 8, 3, [4])
    ((y, bad),) = nccl_ranks()(bad_ids, problem.params(), problem, world=1)
    assert bad == 2
    ids = problem.topk_ids[0].clone()
    ids[0, 0] = ids[1, 1] = -1
    check_results(Problem(1, 5, 8, 3, problem.xs, (ids,), problem.topk_weights), problem.params(), [y])


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("how", ["ids", "rows", "destroyed after sending"])
def test_a_rank_that_fails_alone(how: str) -> None:
    problem = make_problem(0, 2, 5, 4, 2, [3, 2])
    params = problem.params(EpLayout.RANK_MAJOR)
    by_rank = nccl_ranks()(fails, params, problem, how, world=2)
    for index in range(2):
        check_results(problem, params, [ys[index] for ys, _, _ in by_rank])
    error = by_rank[0][1]
    assert isinstance(error, MoEEpPeerError) and error.rank == 1, error


def sends_first(ctx: RankContext, params: FleetParams, problem: Problem) -> torch.Tensor:
    """In a Fleet's first step, whose memory nobody has taken yet, rank 0 sends while rank 1 waits for the word that it
    has: nothing on the way may wait for the GPU, and so for rank 1."""
    fleet, (x, ids, weights), store = ctx.fleet(params), ctx.mine(problem), ctx.bootstrap.tcp_store
    handle = routed(fleet, ids, weights)
    if ctx.rank == 1:
        store.wait(["rank 0 has sent"])
    handle.dispatch_send_only(sent(x))
    if ctx.rank == 0:
        store.set("rank 0 has sent", "")
    return handle.combine(made(compute(fleet, handle.dispatch_recv_only()))).x


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("tokens", [3, 1500])  # whose rows come with their status, and after it
def test_sending_waits_for_nobody(tokens: int) -> None:
    problem = make_problem(tokens, 2, 5, 2048, 3, [tokens, tokens])
    check_results(problem, problem.params(), nccl_ranks()(sends_first, problem.params(), problem, world=2))


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_killed_rank_is_named() -> None:
    """NCCL itself says nothing."""
    problem = make_problem(0, 2, 5, 4, 2, [3, 2])
    survivor, gone = nccl_ranks().outcomes(killed, problem.params(), problem, world=2)
    assert gone.exitcode == -signal.SIGKILL and survivor.error is None, survivor.error
    for error in survivor.value:
        assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
        assert "rank 1: its process has ended" in str(error) and "a collective needs all ranks" in str(error)


def late(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 1 comes after rank 0 has given up, and all go on."""
    fleet, mine = ctx.fleet(params, timeout_s=8.0), ctx.mine(problem)  # NCCL may take seconds to connect
    y = step(fleet, *mine)[1]
    if ctx.rank == 1:
        ctx.bootstrap.tcp_store.wait(["rank 0 gave up"])
        time.sleep(0.2)
    error = caught(lambda: step(fleet, *mine))
    if ctx.rank == 0:
        ctx.bootstrap.tcp_store.set("rank 0 gave up", "")
    return [y, step(fleet, *mine)[1]], error


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_late_rank() -> None:
    problem = make_problem(0, 2, 5, 4, 2, [3, 2])
    by_rank = nccl_ranks()(late, problem.params(), problem, world=2)
    for index in range(2):
        check_results(problem, problem.params(), [ys[index] for ys, _ in by_rank])
    assert isinstance(by_rank[0][1], MoEEpTimeoutError) and by_rank[0][1].ranks == (1,)
    assert isinstance(by_rank[1][1], MoEEpPeerError) and by_rank[1][1].rank == 0


def takes_memory(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 1 leaves a Fleet, rank 0 sends in it and leaves too. Then both take memory that their GPU has to give, and
    run a kernel for the first time."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    step(fleet, x, ids, weights)
    ctx.meet("both have made a step")
    if ctx.rank == 1:
        fleet.destroy()
    ctx.meet("rank 1 has left")
    if ctx.rank == 0:
        routed(fleet, ids, weights).dispatch_send_only(sent(x))
        fleet.destroy()
    torch.cuda.empty_cache()
    halves = torch.full((1 << 28,), 0.5, device=ctx.device)
    return torch.special.i0e(halves)[-1], step(ctx.fleet(params), x, ids, weights)[1]


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_collective_that_was_left_behind_holds_nothing_up() -> None:
    problem = make_problem(0, 2, 5, 4, 2, [3, 2])
    by_rank = nccl_ranks()(takes_memory, problem.params(), problem, world=2)
    check_results(problem, problem.params(), [y for _, y in by_rank])
