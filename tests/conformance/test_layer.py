"""MoEEpLayer over a transport: the answer that every path must give, from tokens to tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    ExpertKernel,
    FleetParams,
    IdentityConfig,
    MoEEpConfigError,
    MoEEpError,
    MoEEpLayer,
    MoEEpPeerError,
    MoEEpTensors,
    MoEWeightPack,
    SplitConfig,
    reference,
    register_kernel,
)
from moefleet.fleet import Fleet
from tests.conformance.context import RankContext
from tests.conformance.ranks import Ranks
from tests.strategies import Problem

CLOSE = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Error allowed for an expert's own arithmetic, as a part of the largest value."""
INTERMEDIATE = 24


def weights_of(fleet: Fleet, problem: Problem, seed: int = 0) -> Any:
    """This rank's experts of a problem."""
    mine = list(fleet.placement.experts_of(fleet.bootstrap.rank))
    w13, w2 = problem.weights(INTERMEDIATE, seed)
    return MoEWeightPack(w13[mine].to(fleet.bootstrap.device), w2[mine].to(fleet.bootstrap.device))


def check(problem: Problem, ys: list[torch.Tensor], seed: int = 0) -> None:
    w13, w2 = problem.weights(INTERMEDIATE, seed)
    for rank, (y, want) in enumerate(zip(ys, reference.forward(problem.xs, *problem.routing, w13, w2), strict=True)):
        allowed = CLOSE[y.dtype] * max(1.0, float(want.abs().max()) if want.numel() else 0)
        torch.testing.assert_close(y.double(), want, rtol=0, atol=allowed, msg=lambda text, r=rank: f"rank {r}: {text}")


def layer_on(ctx: RankContext, fleet: Fleet, params: FleetParams, problem: Problem, seed: int = 0) -> MoEEpLayer:
    return MoEEpLayer(ctx.bootstrap, params, weights_of(fleet, problem, seed), fleet=fleet)


def forward(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[torch.Tensor]:
    fleet = ctx.fleet(params)
    layer = layer_on(ctx, fleet, params, problems[0])
    return [layer(MoEEpTensors(*ctx.mine(problem))) for problem in problems]


@pytest.mark.parametrize(
    "world, experts, dtype",
    [
        (1, 4, torch.float32), (2, 4, torch.float32), (3, 7, torch.float32), (4, 3, torch.float32),
        (2, 4, torch.bfloat16), (3, 7, torch.bfloat16), (3, 7, torch.float16), (4, 3, torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_real_experts(ranks: Ranks, layout: EpLayout, world: int, experts: int, dtype: torch.dtype) -> None:
    """Experts without tokens hung or broke the grouped product (case 5), as did ranks without experts (case 21)."""
    ranks.require_ranks(world)
    problems = []
    for seed, special in enumerate(["random", "one_expert", "zipf", "absent", "distinct"]):
        tokens = [(3 * rank + seed) % 7 for rank in range(world)]
        problems.append(
            ranks.problem(tokens, seed=seed, experts=experts, topk=3, hidden=32, dtype=dtype, special=special)
        )
    params = ranks.params(problems[0], layout, max_tokens_per_rank=7)
    by_rank = ranks(forward, params, problems, world=world)
    for index, problem in enumerate(problems):
        check(problem, [ys[index] for ys in by_rank])


def own_fleet(ctx: RankContext, params: FleetParams, problem: Problem, kernel: str) -> Any:
    """A layer that builds its Fleet, in a with block, with a place for the result."""
    experts = None
    if kernel == "grouped_gemm":
        with ctx.fleet(params) as fleet:
            experts = weights_of(fleet, problem)
    x, ids, weights = ctx.mine(problem)
    place = torch.full_like(x, float("nan"))
    backend = SplitConfig(ctx.transport, IdentityConfig() if kernel == "identity" else kernel)
    with MoEEpLayer(ctx.bootstrap, params, experts, backend=backend) as layer:
        assert layer(MoEEpTensors(x, ids, weights, output=place)) is place
        assert ctx.transport in repr(layer) and kernel in repr(layer)
    with pytest.raises(MoEEpError, match="destroyed"):
        layer(MoEEpTensors(x, ids, weights))
    layer.destroy()
    return place


@pytest.mark.parametrize("kernel", ["identity", "grouped_gemm"])
def test_a_layer_with_a_fleet_of_its_own(ranks: Ranks, layout: EpLayout, kernel: str) -> None:
    problem = ranks.problem([4, 0, 3], experts=4, hidden=16)
    params = ranks.params(problem, layout)
    ys = ranks(own_fleet, params, problem, kernel)
    if kernel == "grouped_gemm":
        return check(problem, ys)
    for y, want in zip(ys, reference.identity_forward(problem.xs, *problem.routing, params.num_experts), strict=True):
        torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-5 if y.dtype is torch.float32 else 0.05)


def many_layers(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[torch.Tensor]:
    """The layers of a model over one Fleet, each with experts of its own, several tokens long."""
    fleet = ctx.fleet(params)
    layers = [layer_on(ctx, fleet, params, problems[0], seed) for seed in range(4)]
    assert all(layer.fleet is fleet for layer in layers)
    ys = [layer(MoEEpTensors(*ctx.mine(problem))) for problem in problems for layer in layers]
    for layer in layers:
        layer.destroy()
    return [*ys, layers[0](MoEEpTensors(*ctx.mine(problems[0])))]  # the Fleet was not theirs


def test_many_layers_share_one_fleet(ranks: Ranks, layout: EpLayout) -> None:
    problems = [ranks.problem([3, 5, 0], seed=seed, experts=5, hidden=16) for seed in range(3)]
    params = ranks.params(problems[0], layout)
    by_rank = ranks(many_layers, params, problems)
    for index in range(12):
        check(problems[index // 4], [ys[index] for ys in by_rank], seed=index % 4)
    check(problems[0], [ys[12] for ys in by_rank])


class Breaks(ExpertKernel):
    """Experts that return their input, or raise when told to."""

    requires_weights = False
    next_raises = False

    def compute(self, out: Any, layout: EpLayout, weights: Any, *, into: Any = None) -> torch.Tensor:
        if self.next_raises:
            raise ZeroDivisionError("an expert divided by zero. " + "And again. " * 100)
        from moefleet.kernels import get_kernel

        return get_kernel("identity").compute(out, layout, None, into=into)


def breaks_once(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    register_kernel("breaks")(Breaks)
    fleet = ctx.fleet(params)
    layer = MoEEpLayer(ctx.bootstrap, params, None, backend=SplitConfig(kernel="breaks"), fleet=fleet)
    tensors, got = MoEEpTensors(*ctx.mine(problem)), []
    for turn in range(6):
        layer.kernel.next_raises = ctx.rank == 1 and turn in (1, 2, 4)
        try:
            got.append(layer(tensors))
        except (MoEEpError, ZeroDivisionError) as error:
            got.append(error)
    return got


def test_an_exception_in_the_experts_of_one_rank(ranks: Ranks, layout: EpLayout) -> None:
    """Its own exception there, MoEEpPeerError on the others, and the next forward works."""
    ranks.require("peer_errors")
    problem = ranks.problem([4, 3, 2], experts=4)
    params = ranks.params(problem, layout)
    by_rank = ranks(breaks_once, params, problem)
    wanted = reference.identity_forward(problem.xs, *problem.routing, params.num_experts)
    for rank, (got, want) in enumerate(zip(by_rank, wanted, strict=True)):
        for turn, outcome in enumerate(got):
            if turn in (0, 3, 5):
                torch.testing.assert_close(
                    outcome.double(), want, rtol=0, atol=1e-5 if ranks.dtype.itemsize == 4 else 0.05
                )
            elif rank == 1:
                assert isinstance(outcome, ZeroDivisionError)
            else:
                assert isinstance(outcome, MoEEpPeerError) and outcome.rank == 1
                if ranks.transport.has("peer_reasons"):
                    assert outcome.reason.startswith("ZeroDivisionError: an expert divided by zero. And")
                    assert len(outcome.reason.encode()) <= 512


def wrong_count(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 1 brings all experts instead of its own; the shared Fleet stays usable."""
    fleet, told = ctx.fleet(params), ""
    if ctx.rank == 1:
        with pytest.raises(MoEEpConfigError) as caught:
            MoEEpLayer(ctx.bootstrap, params, MoEWeightPack(*problem.weights(INTERMEDIATE)), fleet=fleet)
        told = str(caught.value)
    return told, layer_on(ctx, fleet, params, problem)(MoEEpTensors(*ctx.mine(problem)))


def test_a_wrong_number_of_local_experts(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([3, 2], experts=6, hidden=16)
    params = ranks.params(problem, layout)
    by_rank = ranks(wrong_count, params, problem, world=2)
    told = by_rank[1][0]
    assert told.startswith("weights: got 6 experts on rank 1, allowed 3, experts [3, 4, 5] of 6"), told
    check(problem, [y for _, y in by_rank])


def wrong_count_alone(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """The same where the layer builds its own Fleet: it gives it back, and the peers learn that at their first step."""
    with ctx.fleet(params) as fleet:
        mine, both = weights_of(fleet, problem), MoEWeightPack(*problem.weights(INTERMEDIATE))
    with pytest.raises(MoEEpError) as caught:
        layer = MoEEpLayer(ctx.bootstrap, params, both if ctx.rank == 1 else mine, backend=ctx.transport)
        with layer:
            layer(MoEEpTensors(*ctx.mine(problem)))
    return caught.value


def test_a_layer_that_cannot_be_built_gives_its_fleet_back(ranks: Ranks, layout: EpLayout) -> None:
    ranks.require("peer_errors")
    problem = ranks.problem([3, 2, 1], experts=6, hidden=16)
    for rank, error in enumerate(ranks(wrong_count_alone, ranks.params(problem, layout), problem)):
        if rank == 1:
            assert isinstance(error, MoEEpConfigError)
        else:
            assert isinstance(error, MoEEpPeerError) and error.rank == 1, error


def other_params(ctx: RankContext, params: FleetParams, others: FleetParams) -> str:
    fleet = ctx.fleet(params)
    with pytest.raises(MoEEpConfigError) as caught:
        MoEEpLayer(ctx.bootstrap, others, None, backend=SplitConfig(kernel="identity"), fleet=fleet)
    return str(caught.value)


def test_a_layer_and_a_shared_fleet_of_other_sizes(ranks: Ranks) -> None:
    problem = ranks.problem([3, 2])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    others = problem.params(EpLayout.EXPERT_MAJOR, max_tokens_per_rank=77)
    for text in ranks(other_params, params, others, world=2):
        assert "MoEEpLayer.fleet" in text and "max_tokens_per_rank=77" in text
