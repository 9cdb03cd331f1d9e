"""Rows that travel as fp8: encoded by the transport, or by the caller with scales beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    FleetAlgoKnobQuantization,
    FleetParams,
    GroupedGemmConfig,
    IdentityConfig,
    MoEEpConfigError,
    MoEEpLayer,
    MoEEpTensors,
    SplitConfig,
    quant,
    reference,
)
from tests.conformance.comparing import check_received
from tests.conformance.context import RankContext, Received, compute, gain_of, made, received, routed, sent
from tests.conformance.ranks import Ranks
from tests.conformance.test_layer import CLOSE, weights_of
from tests.strategies import Problem

FP8 = FleetAlgoKnobQuantization(frozenset({"FP8E4M3"}))


def as_bytes(got: Any) -> Any:
    """fp8 rows as bytes, which can be compared and sent."""
    name = "rows" if isinstance(got, Received) else "expert_tensors"
    change = {name: getattr(got, name).contiguous().view(torch.uint8)}
    return got._replace(**change) if isinstance(got, Received) else replace(got, **change)


def steps(ctx: RankContext, params: FleetParams, problem: Problem, scaled: bool) -> list[Any]:
    """Three steps; with ``scaled`` the rank encodes its tokens itself. In some the experts write where they can."""
    fleet, (x, ids, weights) = ctx.fleet(params, [] if scaled else [FP8]), ctx.mine(problem)
    given, got = quant.encode(x) if scaled else (x,), []
    for number in range(3):
        with routed(fleet, ids, weights) as handle:
            out = handle.dispatch(sent(*given))
            assert out.row_dtype == (torch.bfloat16 if scaled else x.dtype)
            first, rows = as_bytes(received(out)), compute(fleet, out)
            into = handle.combine_buffer() if number else None
            if into is not None:
                assert into.dtype == rows.dtype and into.shape == rows.shape
                rows = into.copy_(rows)
            got.append((first, handle.combine(made(rows)).x))
    return got


def check(problem: Problem, params: FleetParams, by_rank: list[Any], canonical: bool, scaled: bool) -> None:
    """What arrived, bit for bit; results against a reference whose tokens were quantised too, and not too far from
    one whose tokens were not."""
    xs, scales = zip(*map(quant.encode, problem.xs), strict=True)
    if scaled:
        wanted = reference.dispatch(xs, *problem.routing, params, scales=scales)
    else:
        wanted = reference.dispatch(problem.xs, *problem.routing, params, quantised=True)
    dtype = torch.bfloat16 if scaled else problem.xs[0].dtype
    gains = [gain_of(ids.double()).where(ids >= 0, 0.0).float() for ids in problem.topk_ids]
    factors = [weights * gain for weights, gain in zip(problem.topk_weights, gains, strict=True)]
    answers = [
        reference.identity_forward(problem.xs, problem.topk_ids, factors, params.num_experts, quantised=quantised)
        for quantised in (True, False)
    ]
    sizes = problem.world_size, problem.topk
    for rank, (got, want) in enumerate(zip(by_rank, wanted, strict=True)):
        for first, y in got:
            check_received(f"rank {rank}", first, as_bytes(want), params, canonical)
            assert y.dtype == dtype
            if y.numel():
                spread = torch.stack([factors[rank].abs().sum(1), gains[rank].amax(1)]).amax()
                largest = 1.1 * float(spread * problem.xs[rank].abs().max())
                error, far = ((y.double() - answer[rank]).abs().max() for answer in answers)
                assert error <= reference.tolerance(dtype, *sizes, largest)
                assert far <= reference.quantised_tolerance(dtype, *sizes, largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_become_fp8_on_their_way(ranks: Ranks, layout: EpLayout, dtype: torch.dtype) -> None:
    ranks.require_quantisation()
    problem = ranks.problem([4, 0, 6], topk=3, hidden=150, dtype=dtype)
    params = ranks.params(problem, layout)
    check(problem, params, ranks(steps, params, problem, False), ranks.transport.has("canonical_order"), False)


def test_more_tokens_than_fit_into_a_message(ranks: Ranks, layout: EpLayout) -> None:
    ranks.require_quantisation()
    problem = ranks.problem([70, 90], topk=2, hidden=300, dtype=torch.bfloat16, special="distinct")
    params = ranks.params(problem, layout)
    by_rank = ranks(steps, params, problem, False, world=2)
    check(problem, params, by_rank, ranks.transport.has("canonical_order"), False)


def test_callers_that_bring_fp8_rows(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([4, 0, 6], topk=3, hidden=150, dtype=torch.bfloat16)
    params = ranks.params(problem, layout, dtype_bytes=1, scale_bytes_per_token=8)
    check(problem, params, ranks(steps, params, problem, True), ranks.transport.has("canonical_order"), True)


def through_a_layer(ctx: RankContext, params: FleetParams, problem: Problem) -> list[torch.Tensor]:
    fleet, (x, ids, weights) = ctx.fleet(params, [FP8]), ctx.mine(problem)
    layer = MoEEpLayer(ctx.bootstrap, params, weights_of(fleet, problem), fleet=fleet)
    same = MoEEpLayer(ctx.bootstrap, params, None, backend=SplitConfig(kernel=IdentityConfig()), fleet=fleet)
    assert layer.kernel.config == GroupedGemmConfig()
    return [each(MoEEpTensors(x, ids, weights)) for each in (layer, same, layer)]


def test_layers_need_not_know(ranks: Ranks, layout: EpLayout) -> None:
    ranks.require_quantisation()
    problem = ranks.problem([5, 0, 3], topk=3, hidden=160, dtype=torch.bfloat16)
    params = ranks.params(problem, layout)
    w13, w2 = problem.weights(24)
    want = reference.forward(problem.xs, *problem.routing, w13, w2, quantised=True)
    plain = reference.identity_forward(problem.xs, *problem.routing, params.num_experts, quantised=True)
    for rank, (y, same, again) in enumerate(ranks(through_a_layer, params, problem)):
        assert y.dtype == torch.bfloat16 and torch.equal(y, again)
        for got, answer in ((y, want[rank]), (same, plain[rank])):
            allowed = CLOSE[torch.bfloat16] * max(1.0, float(answer.abs().max()) if answer.numel() else 0)
            torch.testing.assert_close(got.double(), answer, rtol=0, atol=allowed)


def build(ctx: RankContext, params: FleetParams, quants: set[str]) -> None:
    ctx.fleet(params, [FleetAlgoKnobQuantization(frozenset(quants))])


@pytest.mark.parametrize("quants", [{"NVFP4"}, {"FP8E4M3", "NVFP4"}])
def test_unknown_formats_are_refused(ranks: Ranks, quants: set[str]) -> None:
    params = ranks.params(ranks.problem([1, 1]), EpLayout.RANK_MAJOR)
    for result in ranks.outcomes(build, params, quants, world=2):
        assert isinstance(result.error, MoEEpConfigError) and "FleetAlgoKnobQuantization" in str(result.error)


def test_scales_of_the_callers_own_are_refused_beside_the_knob(ranks: Ranks) -> None:
    ranks.require_quantisation()
    params = ranks.params(ranks.problem([1, 1]), EpLayout.RANK_MAJOR, scale_bytes_per_token=4)
    for result in ranks.outcomes(build, params, {"FP8E4M3"}, world=2):
        assert isinstance(result.error, MoEEpConfigError) and "scale_bytes_per_token" in str(result.error)
