"""What a row carries besides its numbers: fp8 encoding in flight, and scales.

The bits are those of :func:`moefleet.quant.encode`. Multiplications are followed by no addition that a compiler could
fuse them with, and divisions are rounded as IEEE says.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....quant import BLOCK
from ....quant.fp8 import LARGEST, SMALLEST_AMAX

_GROUP = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_FINITE = tl.constexpr(3.4028234663852886e38)


class Rows(NamedTuple):
    """How dispatch carries rows, as constants of its kernel.

    Attributes:
        encode: whether tokens become fp8 rows and scales on their way.
        native: whether the GPU converts to e4m3 by an instruction.
        piece: columns encoded at once, a multiple of 128.
        scales: scales of a row, 0 for none.
        scale_block: scales copied at once.
    """

    encode: bool
    native: bool
    piece: int
    scales: int
    scale_block: int


@triton.jit
def encoded(source, x_h, start, H: tl.constexpr, R: tl.constexpr):
    """Columns ``start`` to ``start + R.piece`` of the row at ``source``: their numbers ``[N, 128]``, e4m3 bits (uint8),
    the numbers of their blocks ``[N]`` and their scales (float32)."""
    BLOCKS: tl.constexpr = R.piece // _GROUP
    block = tl.arange(0, BLOCKS)
    cols = start + block[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    value = tl.load(source + cols.to(tl.int64) * x_h, mask=cols < H, other=0).to(tl.float32)
    size = tl.abs(value)
    size = tl.where(size <= _FINITE, size, float("inf"))  # NaN too
    amax = tl.maximum(tl.max(size, 1), _SMALLEST_AMAX)
    finite = amax <= _FINITE
    factor = tl.div_rn(tl.full(amax.shape, _LARGEST, tl.float32), amax)
    bits = to_e4m3(tl.where(finite[:, None], value, 0.0) * factor[:, None], R.native)
    scale = tl.div_rn(amax, tl.full(amax.shape, _LARGEST, tl.float32))
    return cols, bits, start // _GROUP + block, scale


@triton.jit
def to_e4m3(value, NATIVE: tl.constexpr):
    """The nearest e4m3 number, ties to even, of float32 numbers that do not round beyond 448; as uint8."""
    if NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        mantissa = (bits & 0x7FFFFF) | 0x800000
        # 3 of 23 bits stay; below 2**-6 (exponent 121) one less for each power of two.
        drop = tl.minimum(20 + tl.maximum(121 - exponent, 0), 31)
        kept = (mantissa + (1 << (drop - 1)) - 1 + ((mantissa >> drop) & 1)) >> drop
        code = tl.maximum(exponent - 121, 0) * 8 + kept
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def copy_scales(source, step, to, R: tl.constexpr):
    """All scales of a row from ``source``, ``step`` elements apart, to ``to``."""
    SCALES: tl.constexpr = R.scales
    STEP: tl.constexpr = R.scale_block
    for start in tl.static_range(0, SCALES, STEP):
        at = start + tl.arange(0, STEP)
        tl.store(to + at, tl.load(source + at.to(tl.int64) * step, mask=at < SCALES), mask=at < SCALES)


@triton.jit
def scales_at(base, offset, scales, row, R: tl.constexpr):
    """Where the scales of ``row`` lie in a shared block's region of scales; ``scales`` says of which type they are."""
    region = tl.multiple_of((base + offset).to(tl.pointer_type(scales.dtype.element_ty)), 16)
    return region + tl.cast(row, tl.int64) * R.scales
