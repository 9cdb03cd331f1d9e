"""The movements of ``gather.py`` with rows on a GPU and indices from the host, queued on the current stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .gather import Movements
from .native_gather import host_movements
from .routes import Ints

_CHUNK_BYTES = 1 << 28  # of float32 rows: what a weighted sum needs beside its result
_ALIGN = 16  # bytes
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float32", "uint8")}


def movements(device: torch.device | str) -> Movements:
    """Those for tensors of this device."""
    return DEVICE if torch.device(device).type == "cuda" else host_movements()


def gather_blocks(
    table: torch.Tensor,
    rows: Ints | torch.Tensor,
    out: torch.Tensor,
    counts: Sequence[int],
    starts: Sequence[int],
    places: Ints | None = None,
) -> None:
    """See :func:`moefleet.substrate.gather.gather_blocks`: all blocks at once. ``rows`` may be on the GPU already."""
    if places is None:
        sizes = np.asarray(counts, np.int64)
        places = np.arange(len(rows)) + (np.asarray(starts, np.int64) - (np.cumsum(sizes) - sizes)).repeat(sizes)
    to, index = tensors_at(table, places, rows)
    out.index_copy_(0, to, table.index_select(0, index))


def sum_bags(table: torch.Tensor, rows: Ints, bag: Ints) -> torch.Tensor:
    """See :func:`moefleet.substrate.gather.sum_bags`."""
    if not len(rows):
        return table.new_zeros(len(bag) - 1, table.shape[1])
    index, edges = tensors_at(table, rows, bag)
    return torch.embedding_bag(table, index, edges, False, 0, False, None, True)[0]


def weighted_sum_bags(table: torch.Tensor, rows: Ints, weight: np.ndarray, bag: Ints, out: torch.Tensor) -> None:
    """See :func:`moefleet.substrate.gather.weighted_sum_bags`."""
    index, weights, edges = tensors_at(table, rows, weight, bag)
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


def tensors_at(table: torch.Tensor, *numbers: np.ndarray | torch.Tensor) -> list[torch.Tensor]:
    """Numbers of the host as tensors where the table is; those that are tensors already are left as they are."""
    host = [each for each in numbers if isinstance(each, np.ndarray)]
    if not table.is_cuda:
        there = iter([torch.from_numpy(each) for each in host])
    else:
        there = iter(upload(host, table.device) if host else [])
    return [next(there) if isinstance(each, np.ndarray) else each for each in numbers]


def upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copies on a GPU, in one transfer, ordered in its current stream. The arrays are free when this returns: what is
    transferred is pinned memory, which torch keeps until that is done."""
    places, total = [], 0
    for each in arrays:
        places.append(slice(total, total + each.nbytes))
        total += -(-each.nbytes // _ALIGN) * _ALIGN
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    lines = packed.numpy()
    for each, place in zip(arrays, places):
        lines[place].view(each.dtype)[:] = each.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [there[place].view(_DTYPES[each.dtype]).view(each.shape) for each, place in zip(arrays, places)]


DEVICE = Movements(gather_blocks, sum_bags, weighted_sum_bags)
