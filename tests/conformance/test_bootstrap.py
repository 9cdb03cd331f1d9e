"""How ranks come together: through a store, a process group, any subset of ranks in any order; and what they check."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefleet import (
    BootstrapConfig,
    EpAlgorithm,
    EpLayout,
    FleetAlgoKnobAllocator,
    FleetAlgoKnobFaultTolerance,
    FleetAlgoKnobNumChannelsPerRank,
    FleetAlgoKnobNumQpsPerRank,
    FleetAlgoKnobQuantization,
    FleetAlgoKnobRdmaBufferSize,
    FleetAlgoKnobTopologyCapacity,
    FleetParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpPeerError,
    MoEEpTimeoutError,
    create_fleet,
)
from moefleet.fleet import fleet_class
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem

# Ways to find each other.


@contextmanager
def default_group(ctx: RankContext) -> Iterator[None]:
    """torch.distributed's default group over all ranks, on the loopback interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.PrefixStore("default", ctx.bootstrap.tcp_store)
    over_nccl = ctx.device.type == "cuda" and ctx.transport == "torch_dist"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if over_nccl else "gloo", store=store, rank=ctx.rank, world_size=ctx.world
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def over_a_group(ctx: RankContext, params: FleetParams, problem: Problem) -> torch.Tensor:
    with default_group(ctx):
        y = torch.empty(0)
        for _ in range(2):
            fleet = ctx.fleet(params, tcp_store=None, process_group=dist.group.WORLD)
            y = step(fleet, *ctx.mine(problem))[1]
            fleet.destroy()
        total = torch.ones(1)
        dist.all_reduce(total)  # the group that was lent is left alone
        assert total.item() == ctx.world
    return y


def test_over_a_process_group(ranks: Ranks) -> None:
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    check_results(problem, params, ranks(over_a_group, params, problem))


PAIRS = ([3, 1], [2, 0])
"""Global ranks of two groups, in the order of their ranks inside the group."""


def over_subgroups(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> tuple[torch.Tensor, int]:
    """Two groups at once, each in descending order of the global ranks where this torch can make such groups."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    with default_group(ctx):
        groups = [dist.new_group(pair, **unsorted) for pair in PAIRS]
        mine = next(index for index, pair in enumerate(PAIRS) if ctx.rank in pair)
        inside = dist.get_rank(groups[mine])
        assert inside == (PAIRS[mine] if unsorted else sorted(PAIRS[mine])).index(ctx.rank)
        fleet = ctx.fleet(params, world_size=2, rank=inside, tcp_store=None, process_group=groups[mine])
        y = step(fleet, *replace_rank(ctx, inside).mine(problems[mine]))[1]
        fleet.destroy()
    return y, inside


def replace_rank(ctx: RankContext, rank: int) -> RankContext:
    return RankContext(replace(ctx.bootstrap, rank=rank), ctx.transport)


def test_over_subgroups_in_another_order(ranks: Ranks) -> None:
    problems = [ranks.problem([3, 5], seed=seed) for seed in range(2)]
    params = ranks.params(problems[0], EpLayout.EXPERT_MAJOR)
    ys = ranks(over_subgroups, params, problems, world=4)
    for pair, problem in zip(PAIRS, problems, strict=True):
        in_order = sorted((ys[rank] for rank in pair), key=lambda found: found[1])
        check_results(problem, params, [y for y, _ in in_order])


def over_one_store(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> torch.Tensor:
    """Two groups at once on one store, each under a prefix of its own."""
    mine = next(index for index, pair in enumerate(PAIRS) if ctx.rank in pair)
    inside = PAIRS[mine].index(ctx.rank)
    store = dist.PrefixStore(f"group {mine}", ctx.bootstrap.tcp_store)
    fleet = ctx.fleet(params, world_size=2, rank=inside, tcp_store=store)
    return step(fleet, *replace_rank(ctx, inside).mine(problems[mine]))[1]


def test_two_groups_on_one_store(ranks: Ranks) -> None:
    problems = [ranks.problem([3, 5], seed=seed) for seed in range(2)]
    params = ranks.params(problems[0], EpLayout.EXPERT_MAJOR)
    ys = ranks(over_one_store, params, problems, world=4)
    for pair, problem in zip(PAIRS, problems, strict=True):
        check_results(problem, params, [ys[rank] for rank in pair])


def from_the_environment(ctx: RankContext, params: FleetParams, problem: Problem, port: int) -> torch.Tensor:
    """As under torchrun: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and nothing else."""
    values = {"RANK": ctx.rank, "WORLD_SIZE": ctx.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        bootstrap = BootstrapConfig.from_env(device=ctx.device, timeout_s=ctx.bootstrap.timeout_s)
        fleet = create_fleet(bootstrap, params, backend=ctx.transport)
        y = step(fleet, *ctx.mine(problem))[1]
        ctx.meet("all are done")  # rank 0 hosts the store
        fleet.destroy()
        return y
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_from_the_environment(ranks: Ranks) -> None:
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    listener = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = listener.port
    del listener
    check_results(problem, params, ranks(from_the_environment, params, problem, port))


# What ranks hold against each other before they build.

SIZES = {
    "num_experts": 9,
    "max_tokens_per_rank": 64,
    "token_hidden_size": 4096,
    "max_topk": 7,
    "layout": EpLayout.RANK_MAJOR,
    "algorithm": EpAlgorithm.HIGH_THROUGHPUT,
    "scale_bytes_per_token": 8,
}


def one_differs(ctx: RankContext, params: FleetParams, problem: Problem, name: str) -> Any:
    mine = params
    if ctx.rank == 1:
        changes = {name: SIZES[name]} | ({"layout": None} if name == "algorithm" else {})
        mine = replace(params, **changes)
    with pytest.raises(MoEEpError) as caught:
        ctx.fleet(mine)
    return caught.value, step(ctx.fleet(params), *ctx.mine(problem))[1]


@pytest.mark.parametrize("name", SIZES)
def test_ranks_that_disagree_are_told_with_both_values(ranks: Ranks, name: str) -> None:
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    other = replace(params, **({name: SIZES[name]} | ({"layout": None} if name == "algorithm" else {})))
    ranks.require_fit(other, ranks.world)
    by_rank = ranks(one_differs, params, problem, name)
    for error, _ in by_rank:
        assert isinstance(error, MoEEpConfigError), error
        assert name in str(error) or name == "algorithm"
        assert f"{getattr(params, name)} on rank 0" in str(error) and f"{getattr(other, name)} on rank 1" in str(error)
    check_results(problem, params, [y for _, y in by_rank])


KNOBS = (
    FleetAlgoKnobFaultTolerance(),
    FleetAlgoKnobTopologyCapacity(8),
    FleetAlgoKnobQuantization(frozenset({"FP8E4M3"})),
    FleetAlgoKnobNumChannelsPerRank(2),
    FleetAlgoKnobNumQpsPerRank(2),
    FleetAlgoKnobRdmaBufferSize(1 << 20),
    FleetAlgoKnobAllocator(torch_caching=True),
)


def with_knob(ctx: RankContext, params: FleetParams, problem: Problem, knobs: list[Any], everybody: bool) -> Any:
    with pytest.raises(MoEEpError) as caught:
        ctx.fleet(params, knobs if everybody or ctx.rank == 1 else [])
    return caught.value, step(ctx.fleet(params), *ctx.mine(problem))[1]


@pytest.mark.parametrize("everybody", [True, False], ids=["on_all_ranks", "on_one_rank"])
@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: type(knob).__name__.removeprefix("FleetAlgoKnob"))
def test_a_knob_that_cannot_be_honoured_is_an_error(ranks: Ranks, knob: Any, everybody: bool) -> None:
    if type(knob) in fleet_class(ranks.transport.name).knobs:
        pytest.skip(f"{ranks.transport.name} honours {type(knob).__name__}")
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    by_rank = ranks(with_knob, params, problem, [knob], everybody)
    for rank, (error, _) in enumerate(by_rank):
        assert type(knob).__name__ in str(error), error
        if everybody or rank == 1:
            assert isinstance(error, MoEEpConfigError), error
        else:
            assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
    check_results(problem, params, [y for _, y in by_rank])


def with_disabled_knob(ctx: RankContext, params: FleetParams, problem: Problem) -> torch.Tensor:
    fleet = ctx.fleet(params, [FleetAlgoKnobFaultTolerance(enabled=False)])
    assert not fleet.supports_fault_tolerance
    with pytest.raises(NotImplementedError, match="query_fault"):
        fleet.query_fault()
    return step(fleet, *ctx.mine(problem))[1]


def test_a_disabled_knob_is_no_knob(ranks: Ranks) -> None:
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    check_results(problem, params, ranks(with_disabled_knob, params, problem))


def one_stays_away(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    error = None
    ctx.meet("all are here")
    if ctx.rank != ctx.world - 1:
        with pytest.raises(MoEEpTimeoutError) as caught:
            ctx.fleet(params, timeout_s=1.0)
        error = caught.value
    ctx.meet("the meeting is over")
    return error, step(ctx.fleet(params), *ctx.mine(problem))[1]


def test_a_rank_that_stays_away_is_named(ranks: Ranks) -> None:
    """And once it comes, late, all meet at the next construction."""
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    by_rank = ranks(one_stays_away, params, problem)
    last = ranks.world - 1
    for error, _ in by_rank[:last]:
        assert isinstance(error, MoEEpTimeoutError) and error.ranks == (last,), error
        assert f"ranks [{last}]" in str(error) and "1 s" in str(error)
    check_results(problem, params, [y for _, y in by_rank])
