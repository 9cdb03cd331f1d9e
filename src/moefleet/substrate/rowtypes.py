"""Row types: which a Fleet carries, and their numbers in headers."""

from __future__ import annotations

import torch

DTYPES: dict[int, tuple[torch.dtype, ...]] = {
    1: (torch.float8_e4m3fn,),
    2: (torch.bfloat16, torch.float16),
    4: (torch.float32,),
}
"""Row types for each ``dtype_bytes``."""

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float8_e4m3fn: 4}
_SCALE_CODES = {dtype: 16 * code for code, dtype in enumerate(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64,
     torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), start=1)}  # fmt: skip


def row_code(dtype: torch.dtype, scale_dtype: torch.dtype | None) -> int:
    """A number for a row type and its scales' type, for headers. Unknown scale types share one code: they are bytes."""
    return _CODES[dtype] + (0 if scale_dtype is None else _SCALE_CODES.get(scale_dtype, 16 * 15))


def code_name(code: int) -> str:
    """What a header's row code means, in words."""
    rows = {c: str(d) for d, c in _CODES.items()}.get(code % 16, f"row code {code % 16}")
    scales = {c: str(d) for d, c in _SCALE_CODES.items()}.get(code - code % 16, "other")
    return rows if code < 16 else f"{rows} with {scales} scales"
