"""Block-scaled fp8: bits by the definition, bounds on what is lost, and what has no finite value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moefleet import MoEEpConfigError
from moefleet.quant import BLOCK, decode, decode_matrices, encode, scales_per_row
from moefleet.quant.fp8 import ABSOLUTE_ERROR, RELATIVE_ERROR, ROW_DTYPE, SMALLEST_AMAX

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(ROW_DTYPE).double()
"""Every finite magnitude, ascending: 0x7F alone is NaN."""


def nearest(y: float) -> float:
    """The e4m3 number nearest to a float, ties to the even one, by looking at all of them."""
    distance = (E4M3 - abs(y)).abs()
    codes = (distance == distance.min()).nonzero().flatten().tolist()
    return math.copysign(float(E4M3[min(codes, key=lambda code: code % 2)]), y)


def by_definition(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, block by block."""
    rows, scales = [], []
    for block in x.float().split(BLOCK):
        amax = block.abs().amax().clamp(min=SMALLEST_AMAX)
        scales.append(amax / 448)
        rows += [nearest(float(y)) for y in block * torch.from_numpy(np.float32(448) / amax[None].numpy())]
    return torch.tensor(rows, dtype=torch.float64), torch.stack(scales)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**16), st.sampled_from([1, 5, 128, 130]), st.floats(-45, 38))
@example(0, 5, -45.0)
def test_bits_are_those_of_the_definition(seed: int, hidden: int, exponent: float) -> None:
    g = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.empty(hidden).uniform_(-6, 0, generator=g)
    x = (torch.randn(hidden, generator=g) * spread * 10.0**exponent).clamp(-3e38, 3e38)
    rows, scales = encode(x)
    want_rows, want_scales = by_definition(x)
    assert torch.equal(rows.double(), want_rows) and torch.equal(scales, want_scales)
    assert torch.equal(rows.double().signbit(), x.signbit())


@DTYPES
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), count=st.integers(0, 3), hidden=st.integers(1, 300))
def test_what_is_lost_is_bounded(dtype: torch.dtype, seed: int, count: int, hidden: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(count, hidden, generator=g) * 10.0 ** torch.empty(count, 1).uniform_(-3, 3, generator=g)).to(dtype)
    rows, scales = encode(x)
    assert rows.shape == x.shape and rows.dtype == ROW_DTYPE and rows.is_contiguous()
    assert scales.shape == (count, scales_per_row(hidden)) and scales.dtype == torch.float32
    amax = scales.double().repeat_interleave(BLOCK, -1)[:, :hidden] * 448
    allowed = torch.maximum(x.double().abs() * RELATIVE_ERROR, amax * ABSOLUTE_ERROR)
    assert ((decode(rows, scales, torch.float64) - x.double()).abs() <= allowed).all()
    assert torch.equal(decode(rows, scales, dtype), decode(rows, scales).to(dtype))


def test_powers_of_two_and_block_maxima_come_back() -> None:
    x = torch.tensor([448.0, -7.0, 1.75, 2.0**-6, 2.0**-9, 0.0, -0.0])
    rows, scales = encode(x)
    assert scales.tolist() == [1.0] and torch.equal(rows.float(), x)


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, float(SMALLEST_AMAX)])
def test_zeros_and_tiny_blocks(tiny: float) -> None:
    x = torch.full((2, 200), tiny)
    x[1, :BLOCK] = 3.0
    rows, scales = encode(x)
    assert scales[0].tolist() == [2.0**-126] * 2 and scales[1, 1] == 2.0**-126
    assert torch.allclose(decode(rows, scales), x, rtol=RELATIVE_ERROR, atol=SMALLEST_AMAX * ABSOLUTE_ERROR)
    assert tiny or not rows[0].float().any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@DTYPES
def test_a_block_that_is_not_finite_is_nan_as_a_whole(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 300, dtype=dtype)
    x[0, 130] = bad
    rows, scales = encode(x)
    assert scales[0, 1] == math.inf and not rows[0, 128:256].float().any()
    y = decode(rows, scales, dtype)
    assert y[0, 128:256].isnan().all()
    y[0, 128:256] = 1
    assert torch.equal(y, torch.ones_like(y))


def test_views() -> None:
    wide = torch.randn(6, 2, 400)
    for x in (wide[::2, :, :130], wide.transpose(0, 1), wide[..., ::3], wide[:1, :, :5].expand(3, -1, -1)):
        rows, scales = encode(x)
        same_rows, same_scales = encode(x.contiguous())
        assert torch.equal(rows.view(torch.uint8), same_rows.view(torch.uint8)) and torch.equal(scales, same_scales)
        assert torch.equal(decode(rows.transpose(0, 1), scales.transpose(0, 1)), decode(rows, scales).transpose(0, 1))


def test_matrices() -> None:
    g = torch.Generator().manual_seed(0)
    matrices = torch.randn(2, 200, 130, generator=g).to(ROW_DTYPE)
    scales = torch.rand(2, 2, 2, generator=g)
    got = decode_matrices(matrices, scales, torch.float32)
    for n, h in ((0, 0), (127, 128), (128, 127), (199, 129)):
        assert torch.equal(got[:, n, h], matrices[:, n, h].float() * scales[:, n // BLOCK, h // BLOCK])


def test_what_is_refused() -> None:
    rows, scales = encode(torch.randn(3, 200))
    with pytest.raises(MoEEpConfigError, match=r"encode: x: got dtype torch\.float64"):
        encode(torch.zeros(1, 1, dtype=torch.float64))
    for bad in (scales[:, :1], scales.double(), scales[:2]):
        with pytest.raises(MoEEpConfigError, match="one for each 128 elements"):
            decode(rows, bad)
    with pytest.raises(MoEEpConfigError, match=r"decode_matrices: scales.*\[1, 2\]"):
        decode_matrices(rows, scales, torch.float32)
