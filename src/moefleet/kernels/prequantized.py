"""fp8 weights as checkpoints have them, for kernels that compute in bfloat16.

float8_e4m3fn matrices with float32 scales of 128 x 128 blocks (``weight_scale_inv``), gate and up rows one above the
other. Decoding them at construction saves a conversion of the checkpoint, and no memory.
"""

from __future__ import annotations

import torch

from .. import quant
from ..errors import config_error
from ..weights import PrequantizedMoEWeights, UnquantizedMoEWeights

DECODED = torch.bfloat16
"""What the weights become."""


def check(weights: PrequantizedMoEWeights) -> None:
    """Raise :class:`MoEEpConfigError` for weights of any other format."""
    for name in ("w13", "w2"):
        matrices, scales = getattr(weights, name), getattr(weights, f"{name}_scale")
        want = (len(matrices), *map(quant.scales_per_row, matrices.shape[1:]))
        if matrices.dtype != quant.ROW_DTYPE or scales.dtype != torch.float32 or scales.shape != want:
            raise config_error(
                f"weights.{name}, {name}_scale",
                f"{matrices.dtype} {list(matrices.shape)}, {scales.dtype} {list(scales.shape)}",
                f"{quant.ROW_DTYPE} and float32 {list(want)}, a scale for each {quant.BLOCK} x {quant.BLOCK} block",
                "decode other formats yourself and give MoEWeightPack(w13, w2)",
            )


def decoded(weights: PrequantizedMoEWeights) -> UnquantizedMoEWeights:
    """The numbers that they stand for, rounded to bfloat16."""
    return UnquantizedMoEWeights(
        quant.decode_matrices(weights.w13, weights.w13_scale, DECODED),
        quant.decode_matrices(weights.w2, weights.w2_scale, DECODED),
    )
