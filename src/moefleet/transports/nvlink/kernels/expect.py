"""Whether as many rows arrived as the caller announced. One program, launched only where somebody did."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .signals import UNEXPECTED, enter, report


@triton.jit
def expect(slot, ctl, alarm, target, S: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr, EARLY: tl.constexpr):
    """Hold the tokens that ``slot``'s dispatch received against ``target``; a rank that failed brought none."""
    enter(EARLY)
    rows = 0
    for s in tl.static_range(W):
        rows += tl.maximum(tl.load(slot + S.got + s), 0)
    if rows != target:
        report(ctl, alarm, UNEXPECTED, RANK, rows + (tl.cast(target, tl.int64) << 20))
