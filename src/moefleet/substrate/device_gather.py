"""The movements of ``gather.py`` with rows on a GPU and indices from the host, queued on the current stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .gather import HOST, Movements
from .routes import Ints

_CHUNK_BYTES = 1 << 28  # of float32 rows: what a weighted sum needs beside its result


def movements(device: torch.device | str) -> Movements:
    """Those for tensors of this device."""
    return DEVICE if torch.device(device).type == "cuda" else HOST


def gather_blocks(
    table: torch.Tensor,
    rows: Ints,
    out: torch.Tensor,
    counts: Sequence[int],
    starts: Sequence[int],
    places: Ints | None = None,
) -> None:
    """See :func:`moefleet.substrate.gather.gather_blocks`: all blocks at once."""
    if places is None:
        sizes = np.asarray(counts, np.int64)
        places = np.arange(len(rows)) + (np.asarray(starts, np.int64) - (np.cumsum(sizes) - sizes)).repeat(sizes)
    out.index_copy_(0, _beside(out, places), table.index_select(0, _beside(table, rows)))


def sum_bags(table: torch.Tensor, rows: Ints, bag: Ints) -> torch.Tensor:
    """See :func:`moefleet.substrate.gather.sum_bags`."""
    if not len(rows):
        return table.new_zeros(len(bag) - 1, table.shape[1])
    index, edges = _beside(table, rows), _beside(table, bag)
    return torch.embedding_bag(table, index, edges, False, 0, False, None, True)[0]


def weighted_sum_bags(table: torch.Tensor, rows: Ints, weight: np.ndarray, bag: Ints, out: torch.Tensor) -> None:
    """See :func:`moefleet.substrate.gather.weighted_sum_bags`."""
    index, weights, edges = _beside(table, rows), _beside(table, weight), _beside(table, bag)
    most = max(1, _CHUNK_BYTES // (4 * table.shape[1]))
    first = 0
    while first < len(out):
        # As many bags as fit, and at least one.
        last = max(first + 1, int(np.searchsorted(bag, bag[first] + most, side="right")) - 1)
        lo, hi = int(bag[first]), int(bag[last])
        source = table.index_select(0, index[lo:hi]).float()
        order = torch.arange(hi - lo, device=table.device)
        sums = torch.embedding_bag(source, order, edges[first : last + 1] - lo, False, 0, False, weights[lo:hi], True)
        out[first:last] = sums[0]
        first = last


def _beside(table: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Numbers of the host, where the table is."""
    return upload(torch.from_numpy(numbers), table.device)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the GPU, ordered in its current stream. The host's tensor is free when this returns: what the copy
    reads is pinned memory, which torch keeps until it is done."""
    return host.pin_memory().to(device, non_blocking=True)


DEVICE = Movements(gather_blocks, sum_bags, weighted_sum_bags)
