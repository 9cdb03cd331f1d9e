"""What a Fleet's stats report, counted by the kernels into words of their own behind the control words.

The first receiving program of a launch adds for all, except rows of experts where no program sees all of them. Nothing
waits for an addition.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .signals import now_ns


@triton.jit
def begin_ns(COUNTS: tl.constexpr):
    """The clock, or 0 where nobody counts."""
    if COUNTS is None:
        return tl.cast(0, tl.int64)
    else:
        return now_ns()


@triton.jit
def add_each(word, values, W: tl.constexpr):
    """Add ``values[i]``, where it is positive, to ``word[i]``, for ``W`` of them."""
    LANES: tl.constexpr = triton.next_power_of_2(W)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int64)
    for i in tl.static_range(W):
        total = tl.where(lane == i, tl.cast(values[i], tl.int64), total)
    add_vector(word + lane, total, (lane < W) & (total > 0))


@triton.jit
def add_vector(words, values, mask):
    """Add a vector of integers to ``words``."""
    tl.atomic_add(words, values.to(tl.int64), mask=mask, sem="relaxed", scope="gpu")
