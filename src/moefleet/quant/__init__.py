"""Low-precision formats: what their bits mean, and how to get there and back. See :mod:`moefleet.quant.fp8`."""

from .fp8 import (
    ABSOLUTE_ERROR,
    BLOCK,
    RELATIVE_ERROR,
    ROW_DTYPE,
    decode,
    decode_matrices,
    encode,
    scales_per_row,
)

__all__ = [
    "ABSOLUTE_ERROR",
    "BLOCK",
    "RELATIVE_ERROR",
    "ROW_DTYPE",
    "decode",
    "decode_matrices",
    "encode",
    "scales_per_row",
]
