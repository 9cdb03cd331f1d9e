"""Block-scaled fp8: float8_e4m3fn elements with one float32 scale for each 128 of a row, or 128 x 128 of a matrix.

The bits are defined here and equal everywhere: in this module on any device, and in the kernels that encode in flight.
For each block of 128 consecutive elements of a row (the last may be shorter), in float32:

    amax    = max(the largest |x|, 448 * 2**-126)      infinite if any element is infinite or NaN
    scale   = amax / 448
    element = round to nearest even of x * (448 / amax), as e4m3; 0 throughout if amax is infinite

448 is the largest e4m3 number. The floor of amax keeps scale and 448 / amax normal numbers, so a block of zeros needs
no rule of its own. ``element * scale`` is off by at most ``2**-4 * |x|``, or ``2**-18 * amax`` for elements that are
small within their block; in a block with an infinity or a NaN every decoded element is NaN, so none is hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import config_error
from ..knobs import QUANTISED_BLOCK

BLOCK = QUANTISED_BLOCK
"""Elements that share a scale."""

ROW_DTYPE = torch.float8_e4m3fn
"""Type of encoded elements."""

LARGEST = 448.0
"""Largest finite element."""

SMALLEST_AMAX = LARGEST * 2.0**-126
"""What a block's amax is raised to."""

RELATIVE_ERROR, ABSOLUTE_ERROR = 2.0**-4, 2.0**-18
"""A decoded element is off by at most ``RELATIVE_ERROR * |x|`` or, if more, ``ABSOLUTE_ERROR * amax``.

e4m3 has 3 bits after the leading one, so rounding to nearest moves a normal number by up to 2**-4 of itself; below
2**-6 numbers are 2**-9 apart, so 2**-10 of a block whose largest is 448, which is less than 2**-18. Products rounded in
float32 add 2**-22, which the bounds have room for.
"""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def scales_per_row(hidden: int) -> int:
    """Scales of a row of ``hidden`` elements: one for each 128, and one for what is left."""
    return -(-hidden // BLOCK)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode rows.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16, of any strides.

    Returns:
        Contiguous float8_e4m3fn ``[..., H]`` and float32 ``[..., ceil(H / 128)]``.
    """
    if x.dtype not in _FLOATS:
        raise config_error("encode: x", f"dtype {x.dtype}", " or ".join(map(str, _FLOATS)))
    blocks = _in_blocks(x.float())
    size = blocks.abs()
    amax = torch.where(size.isfinite(), size, torch.inf).amax(-1, keepdim=True).clamp_(min=SMALLEST_AMAX)
    largest = torch.full_like(amax, LARGEST)  # a tensor and a number would not be divided in one rounding everywhere
    elements = torch.where(amax.isfinite(), blocks * (largest / amax), 0.0).to(ROW_DTYPE)
    return elements.flatten(-2)[..., : x.shape[-1]].contiguous(), (amax / largest).squeeze(-1)


def decode(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows as numbers again: each element times its block's scale, rounded once.

    Args:
        rows: float8_e4m3fn ``[..., H]``, of any strides.
        scales: float32 ``[..., ceil(H / 128)]``.
        dtype: of the result: any wider floating-point type.

    Returns:
        ``[..., H]``.

    Raises:
        MoEEpConfigError: scales of another shape or type than :func:`encode` makes.
    """
    hidden = rows.shape[-1]
    want = (*rows.shape[:-1], scales_per_row(hidden))
    if rows.dtype != ROW_DTYPE or scales.dtype != torch.float32 or scales.shape != want:
        raise config_error(
            "decode: rows and scales",
            f"{rows.dtype} {list(rows.shape)} and {scales.dtype} {list(scales.shape)}",
            f"{ROW_DTYPE} with float32 scales {list(want)}, one for each {BLOCK} elements of a row",
            "decode rows of other formats yourself",
        )
    numbers = _in_blocks(rows.to(dtype))  # exact: every wider type has e4m3's numbers
    numbers *= scales[..., None]
    return numbers.flatten(-2)[..., :hidden]


def decode_matrices(matrices: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Matrices as numbers again: each element times the scale of its 128 x 128 block.

    Args:
        matrices: float8_e4m3fn ``[..., N, H]``.
        scales: float32 ``[..., ceil(N / 128), ceil(H / 128)]``, as checkpoints have it (``weight_scale_inv``).
        dtype: of the result.

    Returns:
        ``[..., N, H]``.

    Raises:
        MoEEpConfigError: scales of another shape or type.
    """
    rows = matrices.shape[-2]
    want = (*matrices.shape[:-2], scales_per_row(rows), scales_per_row(matrices.shape[-1]))
    if scales.shape != want:
        raise config_error(
            "decode_matrices: scales",
            f"shape {list(scales.shape)}",
            f"{list(want)}, one for each {BLOCK} x {BLOCK} block of {list(matrices.shape)}",
        )
    return decode(matrices, scales.repeat_interleave(BLOCK, -2)[..., :rows, :], dtype)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """``[..., H]`` as ``[..., blocks, 128]``, with zeros behind a last block that is shorter."""
    short = -x.shape[-1] % BLOCK
    return (F.pad(x, (0, short)) if short else x).unflatten(-1, (-1, BLOCK))
