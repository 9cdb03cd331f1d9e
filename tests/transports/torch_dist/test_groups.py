"""Whose process group it is: the caller's in any order, which is left alone, or one of our own."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefleet import (
    BootstrapConfig,
    EpLayout,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpFaultToleranceUnsupportedError,
    create_fleet,
    probe,
    supports_fault_tolerance,
)
from moefleet.transports.torch_dist.group import device_of
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, step
from tests.strategies import Problem, make_problem
from tests.transports.torch_dist.ranks import caught, gloo_ranks

PARAMS = FleetParams(2, 1, 4)


def two_groups(ctx: RankContext, params: FleetParams, problem: Problem, members: list[int]) -> Any:
    """A Fleet on some ranks of the world, while the whole world's group stays usable."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", ctx.bootstrap.tcp_store), rank=ctx.rank, world_size=4
    )
    try:
        group = dist.new_group(members)
        y = None
        if ctx.rank in members:
            rank = dist.get_group_rank(group, ctx.rank)
            bootstrap = BootstrapConfig(len(members), rank, device="cpu", process_group=group)
            with create_fleet(bootstrap, params, backend="torch_dist") as fleet:
                y = step(fleet, problem.xs[rank], problem.topk_ids[rank], problem.topk_weights[rank])[1]
            sum_of_ranks = torch.tensor(rank)
            dist.all_reduce(sum_of_ranks, group=group)
            assert int(sum_of_ranks) == len(members) * (len(members) - 1) // 2
        else:
            outsider = BootstrapConfig(1, 0, device="cpu", process_group=group, tcp_store=dist.HashStore())
            error = caught(lambda: create_fleet(outsider, PARAMS, backend="torch_dist"))
            assert isinstance(error, MoEEpConfigError) and "that this process belongs to" in str(error), error
        everybody = torch.ones(1)
        dist.all_reduce(everybody)
        return y, float(everybody)
    finally:
        dist.destroy_process_group()


def test_a_subset_of_the_world() -> None:
    problem = make_problem(0, 2, 5, 4, 3, [3, 4])
    params = problem.params()
    by_rank = gloo_ranks()(two_groups, params, problem, [1, 3], world=4)
    assert [everybody for _, everybody in by_rank] == [4.0] * 4
    check_results(problem, params, [y for y, _ in by_rank if y is not None])


def reversed_order(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """A group whose ranks count backwards."""
    rank, store = ctx.world - 1 - ctx.rank, ctx.bootstrap.tcp_store
    group = dist.ProcessGroupGloo(dist.PrefixStore("backwards", store), rank, ctx.world, timedelta(seconds=30))
    bootstrap = replace(ctx.bootstrap, rank=rank, process_group=group)
    with create_fleet(bootstrap, params, backend="torch_dist") as fleet:
        y = step(fleet, problem.xs[rank], problem.topk_ids[rank], problem.topk_weights[rank])[1]
    wrong = replace(ctx.bootstrap, process_group=group, tcp_store=dist.PrefixStore("wrong", store))
    error = caught(lambda: create_fleet(wrong, params, backend="torch_dist"))
    group.allreduce([torch.ones(1)]).wait()
    return y, error


def test_ranks_in_reversed_order() -> None:
    problem = make_problem(1, 3, 5, 4, 3, [3, 0, 4])
    params = problem.params(EpLayout.RANK_MAJOR)
    by_rank = gloo_ranks()(reversed_order, params, problem)
    check_results(problem, params, [y for y, _ in reversed(by_rank)])
    for rank, (_, error) in enumerate(by_rank):
        if rank != 1:  # which has the same number in both orders, and hears of it
            assert isinstance(error, MoEEpConfigError), error
            assert f"BootstrapConfig.rank: got {rank}, allowed {2 - rank}" in str(error)
        assert isinstance(error, MoEEpError)


def from_environment(ctx: RankContext, params: FleetParams, problem: Problem, port: int) -> Any:
    """Nothing but MASTER_ADDR and MASTER_PORT: the store and the group are ours."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        bootstrap = BootstrapConfig(ctx.world, ctx.rank, device="cpu", timeout_s=30)
        with create_fleet(bootstrap, params, backend="torch_dist") as fleet:
            y = step(fleet, *ctx.mine(problem))[1]
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return y, dist.is_initialized()


def test_a_group_of_our_own_leaves_the_default_one_alone() -> None:
    from moefleet.launch.pool import host_store

    problem = make_problem(2, 2, 3, 4, 2, [2, 2])
    params = problem.params()
    free = host_store()
    port = free.port
    del free
    by_rank = gloo_ranks()(from_environment, params, problem, port, world=2)
    check_results(problem, params, [y for y, _ in by_rank])
    assert not any(initialised for _, initialised in by_rank)


def test_a_world_of_one_needs_nothing() -> None:
    problem = make_problem(2, 1, 3, 4, 2, [3])
    with create_fleet(BootstrapConfig(1, 0, device="cpu"), problem.params(), backend="torch_dist") as fleet:
        check_results(
            problem, problem.params(), [step(fleet, *(part[0] for part in (problem.xs, *problem.routing)))[1]]
        )


def test_fault_tolerance_is_refused() -> None:
    assert not supports_fault_tolerance("torch_dist")
    assert "fault_tolerance" not in probe("torch_dist").features
    alone = BootstrapConfig(1, 0, device="cpu")
    with pytest.raises(MoEEpError, match="a collective cannot skip a dead member"):
        create_fleet(alone, PARAMS, [FleetAlgoKnobFaultTolerance()], backend="torch_dist")
    with create_fleet(alone, PARAMS, [FleetAlgoKnobFaultTolerance(enabled=False)], backend="torch_dist") as fleet:
        assert not fleet.supports_fault_tolerance
        for call in (fleet.query_fault, fleet.query_active_mask, fleet.reconcile_active_mask, fleet.clear_faults):
            with pytest.raises(MoEEpFaultToleranceUnsupportedError, match="a collective cannot skip a dead member"):
                call()


def test_the_device_follows_the_group() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert device_of(BootstrapConfig(1, 0, process_group=group)) == torch.device("cpu")
    assert device_of(BootstrapConfig(1, 0, process_group=group, device="cpu")) == torch.device("cpu")
