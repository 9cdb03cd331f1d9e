"""The movements of ``gather.py`` in C, see ``moefleet.native``: a step's rows cross memory once, in one call.

With the same bits: a sum goes over its rows in the same order, in float32, and is rounded as torch rounds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from .. import native
from . import gather
from .gather import HOST, Movements
from .routes import Ints

STREAM_BYTES = 1 << 20
"""A movement that writes as much goes past the caches: about what a core's own holds beside all else."""
_LINE = 64
TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Row types, as the helper numbers them."""


def host_movements() -> Movements:
    """Those in C, where they can be had."""
    library = native.library()
    return HOST if library is None else _movements_of(library)


@cache
def _movements_of(library: ctypes.CDLL) -> Movements:
    copy_rows, add_up = library.moefleet_copy_rows, library.moefleet_sum_bags
    away = ties_go_away()

    def gather_blocks(
        table: torch.Tensor,
        rows: Ints,
        out: torch.Tensor,
        counts: Sequence[int],
        starts: Sequence[int],
        places: Ints | None = None,
    ) -> None:
        """See :func:`moefleet.substrate.gather.gather_blocks`."""
        count = len(rows)
        if not count:
            return
        if places is None:
            sizes = np.asarray(counts, np.int64)
            places = np.arange(count) + (np.asarray(starts, np.int64) - (np.cumsum(sizes) - sizes)).repeat(sizes)
        table, size, at = dense(table), out.shape[1] * out.itemsize, out.data_ptr()
        stream = count * size >= STREAM_BYTES and size % _LINE == 0 and at % _LINE == 0
        _require(
            copy_rows(
                table.data_ptr(), table.stride(0) * table.itemsize, len(table), rows.ctypes.data, count,
                at, len(out), places.ctypes.data, size, stream,
            )
        )  # fmt: skip

    def bags(
        table: torch.Tensor, rows: Ints, weight: np.ndarray | None, bag: Ints, out: torch.Tensor, ties: bool
    ) -> None:
        table, at = dense(table), None if weight is None else weight.ctypes.data
        _require(
            add_up(
                TYPE_CODES[table.dtype], table.data_ptr(), table.stride(0) * table.itemsize, len(table),
                rows.ctypes.data, at, bag.ctypes.data, len(bag) - 1, out.data_ptr(), out.stride(0) * out.itemsize,
                out.shape[1], ties,
            )
        )  # fmt: skip

    def sum_bags(table: torch.Tensor, rows: Ints, bag: Ints) -> torch.Tensor:
        """See :func:`moefleet.substrate.gather.sum_bags`."""
        out = torch.empty(len(bag) - 1, table.shape[1], dtype=table.dtype)
        bags(table, rows, None, bag, out, away)
        return out

    def weighted_sum_bags(table: torch.Tensor, rows: Ints, weight: np.ndarray, bag: Ints, out: torch.Tensor) -> None:
        """See :func:`moefleet.substrate.gather.weighted_sum_bags`."""
        bags(table, rows, weight, bag, out, False)

    return Movements(gather_blocks, sum_bags, weighted_sum_bags)


@cache
def ties_go_away() -> bool:
    """How torch's own sums round a bfloat16 that is half way between two: away from 0, or to the even one."""
    table = torch.tensor([[1.0], [2.0**-8]], dtype=torch.bfloat16)
    return bool(gather.sum_bags(table, np.arange(2), np.array([0, 2]))[0, 0] > 1)


def dense(rows: torch.Tensor) -> torch.Tensor:
    """The same rows with each one's elements side by side: themselves, if they are."""
    if rows.is_neg():
        rows = rows.resolve_neg()
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _require(status: int) -> None:
    if status:
        raise IndexError("a row that is not in the table")
