"""The two movements of rows: gather them into blocks, and sum them in bags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .routes import Ints

_CHUNK_BYTES = 1 << 19  # of float32 sums: what stays in a core's cache on its way to shared memory
_SMALL_BYTES = 1 << 17  # below this a second copy costs less than one call per block


def gather_blocks(
    table: torch.Tensor,
    rows: Ints,
    out: torch.Tensor,
    counts: Sequence[int],
    starts: Sequence[int],
    places: Ints | None = None,
) -> None:
    """Copy the rows of ``table`` that ``rows`` names to blocks of ``out``.

    Args:
        table: ``[many, H]``.
        rows: ``[N]``, block after block.
        out: ``[places, H]``.
        counts: rows of each block, ``N`` in all.
        starts: place of each block's first row.
        places: ``[N]`` place of each row, where it is known anyway.
    """
    index, lo = torch.from_numpy(rows), 0
    if places is not None and len(rows) * table.shape[1] * table.element_size() <= _SMALL_BYTES:
        out.index_copy_(0, torch.from_numpy(places), table.index_select(0, index))
        return
    for count, at in zip(counts, starts, strict=True):
        if count:
            torch.index_select(table, 0, index[lo : lo + count], out=out[at : at + count])
            lo += count


def sum_bags(table: torch.Tensor, rows: Ints, bag: Ints) -> torch.Tensor:
    """``[B, H]`` in the table's dtype: the float32 sum of ``table[rows[bag[b]:bag[b+1]]]`` for each bag, 0 if empty."""
    bags = len(bag) - 1
    if not len(rows):
        return table.new_zeros(bags, table.shape[1])
    return torch.embedding_bag(table, torch.from_numpy(rows), torch.from_numpy(bag), False, 0, False, None, True)[0]


def weighted_sum_bags(table: torch.Tensor, rows: Ints, weight: np.ndarray, bag: Ints, out: torch.Tensor) -> None:
    """As :func:`sum_bags` with a float32 weight for each row, written to ``out`` ``[B, H]``, rounded once."""
    index, weights, edges = torch.from_numpy(rows), torch.from_numpy(weight), torch.from_numpy(bag)
    step = max(1, _CHUNK_BYTES // (4 * table.shape[1]))
    for first in range(0, len(out), step):
        last = min(first + step, len(out))
        lo, hi = int(bag[first]), int(bag[last])
        source, picked = table, index[lo:hi]
        if table.dtype != torch.float32 or not table.is_contiguous():  # else embedding_bag adds in another order
            source, picked = table.index_select(0, picked).float(), torch.arange(hi - lo)
        sums = torch.embedding_bag(source, picked, edges[first : last + 1] - lo, False, 0, False, weights[lo:hi], True)
        out[first:last] = sums[0]


class Movements(NamedTuple):
    """These functions as a value: there is another set for GPUs, see ``device_gather.py``."""

    gather_blocks: Callable[..., None]
    sum_bags: Callable[[torch.Tensor, Ints, Ints], torch.Tensor]
    weighted_sum_bags: Callable[[torch.Tensor, Ints, np.ndarray, Ints, torch.Tensor], None]


HOST = Movements(gather_blocks, sum_bags, weighted_sum_bags)
