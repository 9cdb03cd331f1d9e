"""fp8 rows with scales through the expert kernels, and fp8 weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefleet import EpLayout, FleetParams, GroupedGemmConfig, IdentityConfig, MoEEpConfigError, MoEWeightPack, quant
from moefleet.kernels import get_kernel
from moefleet.tensors import DispatchOutput
from tests.kernels.test_grouped_gemm import LAYOUTS, assert_close, existing, expected, make_weights, received

NAN = float("nan")


def as_fp8(out: DispatchOutput, dtype: torch.dtype) -> tuple[DispatchOutput, DispatchOutput]:
    """What arrives where ``out``'s rows travel as fp8, NaN past the counts, and the same with decoded rows."""
    rows, scales = quant.encode(out.expert_tensors)
    low = replace(out, expert_tensors=rows, expert_scales=scales, combine_dtype=dtype)
    return low, replace(out, expert_tensors=quant.decode(rows, scales, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity(layout: EpLayout, dtype: torch.dtype) -> None:
    low, plain = as_fp8(received(layout, dtype, hidden=130), dtype)
    kernel = get_kernel(IdentityConfig())
    got = kernel.compute(low, layout, None)
    assert got.dtype == dtype and got.shape == low.expert_tensors.shape
    exact = replace(
        plain, expert_tensors=quant.decode(low.expert_tensors, low.expert_scales)
    )  # rounded once, at the end
    want = kernel.compute(exact, layout, None).to(dtype)
    assert torch.equal(existing(low, got), existing(low, want))
    into = torch.full_like(got, 7.0)
    assert kernel.compute(low, layout, None, into=into) is into
    assert torch.equal(existing(low, into), existing(low, want))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm(layout: EpLayout, dtype: torch.dtype) -> None:
    weights = make_weights(dtype, hidden=160)
    low, plain = as_fp8(received(layout, dtype, hidden=160), dtype)
    kernel = get_kernel(GroupedGemmConfig())
    got = kernel.compute(low, layout, weights)
    assert got.dtype == dtype and torch.equal(existing(low, got), existing(low, kernel.compute(plain, layout, weights)))
    on_device = torch.full_like(got, NAN)
    kernel._on_device(low, weights, on_device)
    assert_close(existing(low, on_device), expected(plain, weights))


def test_rows_without_scales_stand_for_themselves() -> None:
    out = received(EpLayout.RANK_MAJOR, torch.bfloat16)
    low = replace(out, expert_tensors=out.expert_tensors.to(quant.ROW_DTYPE), combine_dtype=torch.bfloat16)
    plain = replace(out, expert_tensors=low.expert_tensors.to(torch.bfloat16))
    for config, weights in ((IdentityConfig(), None), (GroupedGemmConfig(), make_weights(torch.bfloat16))):
        kernel = get_kernel(config)
        got, want = (kernel.compute(each, EpLayout.RANK_MAJOR, weights) for each in (low, plain))
        assert torch.equal(existing(out, got), existing(out, want))


def test_scales_of_another_format() -> None:
    low, _ = as_fp8(received(EpLayout.RANK_MAJOR, torch.bfloat16), torch.bfloat16)
    low = replace(low, expert_scales=torch.ones(*low.expert_tensors.shape[:-1], 1, dtype=torch.uint8))
    with pytest.raises(MoEEpConfigError, match="one for each 128 elements of a row"):
        get_kernel(IdentityConfig()).compute(low, EpLayout.RANK_MAJOR, None)


def test_weights_go_with_combines_rows() -> None:
    kernel = get_kernel(GroupedGemmConfig())
    kernel.validate(FleetParams(3, 8, 16, dtype_bytes=1), make_weights(torch.bfloat16))
    with pytest.raises(MoEEpConfigError, match="allowed a type of 2 bytes, like combine's rows"):
        kernel.validate(FleetParams(3, 8, 16, dtype_bytes=1), make_weights(torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prequantised_weights(layout: EpLayout) -> None:
    """As checkpoints have them: decoded to bfloat16 once, then as if they had been that."""
    g = torch.Generator().manual_seed(0)
    plain = make_weights(torch.float32, hidden=160, inter=136)
    w13, w2 = (plane.to(quant.ROW_DTYPE) for plane in (plain.w13, plain.w2))
    w13_scale, w2_scale = (
        torch.rand(3, *map(quant.scales_per_row, plane.shape[1:]), generator=g) for plane in (w13, w2)
    )
    kernel, params = get_kernel(GroupedGemmConfig()), FleetParams(3, 8, 160)
    packed = MoEWeightPack(w13, w2, w13_scale, w2_scale)
    kernel.validate(params, packed)
    ready = kernel.preprocess(packed)
    assert ready.w13.dtype == ready.w2.dtype == torch.bfloat16
    assert torch.equal(ready.w13[1, 130, 140], (w13[1, 130, 140].float() * w13_scale[1, 1, 1]).bfloat16())
    out = received(layout, torch.bfloat16, hidden=160)
    assert_close(existing(out, kernel.compute(out, layout, ready)), expected(out, ready))
    for bad in (
        MoEWeightPack(w13, w2, w13_scale[:, :1], w2_scale),
        MoEWeightPack(w13, w2, w13_scale, w2_scale.double()),
        MoEWeightPack(w13.float(), w2.float(), w13_scale, w2_scale),
    ):
        with pytest.raises(MoEEpConfigError, match="a scale for each 128 x 128 block"):
            kernel.validate(params, bad)
    with pytest.raises(MoEEpConfigError, match=r"torch.bfloat16, allowed a type of 4 bytes"):
        kernel.validate(replace(params, dtype_bytes=4), packed)
