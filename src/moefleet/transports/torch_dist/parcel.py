"""What a rank sends in one phase: rows grouped by rank, and in dispatch beside each a row of routing bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...substrate.device_gather import tensors_at
from ...substrate.gather import Movements
from ...substrate.routes import Homecoming, Ints, count_to
from .status import Inline


class Departures(NamedTuple):
    """Which of its tokens a rank sends where: each once to every rank that serves it.

    Attributes:
        token: ``[N]`` by destination, then token.
        counts: how many of them for each rank.
    """

    token: Ints
    counts: tuple[int, ...]

    @classmethod
    def of(cls, back: Homecoming, world_size: int) -> Departures:
        token = np.repeat(np.arange(len(back.bag) - 1), np.diff(back.bag))
        order = np.argsort(back.rank, kind="stable")
        return cls(token[order], tuple(np.bincount(back.rank, minlength=world_size).tolist()))


class Parcel(NamedTuple):
    """Rows for every rank, in rank order.

    Attributes:
        table: ``[many, H]``.
        rows: ``[N]`` which lines of the table, on the host or beside it; ``None``: the first N, as they lie.
        counts: how many of them for each rank.
        meta: uint8 ``[many, B]``, indexed as the table.
        mark: the point in the caller's stream up to which it was packed, on a GPU.
    """

    table: torch.Tensor
    rows: Ints | torch.Tensor | None
    counts: tuple[int, ...]
    meta: torch.Tensor | None = None
    mark: torch.cuda.Event | None = None

    def fitting(self, room: int) -> Inline:
        """What of it fits into blocks with ``room`` bytes for each rank."""
        most, meta = max(self.counts), 0 if self.meta is None else self.meta.shape[1]
        if most * (self.table.shape[1] * self.table.element_size() + meta) <= room:
            return Inline.ROWS
        return Inline.ROUTING if most * meta <= room else Inline.NOTHING

    def write(self, blocks: torch.Tensor, end: int, moves: Movements) -> None:
        """Pack into blocks, one for each rank: rows from the front on, meta rows up to byte ``end``.

        Args:
            blocks: uint8 ``[W, capacity]``; the capacity divides by the size of a row.
        """
        out = blocks.view(self.table.dtype).view(-1, self.table.shape[1])
        counts = np.array(self.counts)
        starts = count_to(blocks.shape[0]) * (out.shape[0] // blocks.shape[0])
        order = np.arange(sum(self.counts))
        places = order + (starts + counts - counts.cumsum()).repeat(counts)
        rows = order if self.rows is None else self.rows
        moves.gather_blocks(self.table, rows, out, self.counts, starts, places)
        self.write_meta(blocks, end)

    def write_meta(self, blocks: torch.Tensor, end: int) -> None:
        """The meta rows alone."""
        if self.meta is None:
            return
        lines, width = self._gathered(self.meta), self.meta.shape[1]
        if blocks.is_cuda:
            parts = lines[: sum(self.counts)].split(self.counts)
            places = [block[end - part.numel() : end] for block, part in zip(blocks, parts, strict=True)]
            torch._foreach_copy_(places, [part.reshape(-1) for part in parts])
            return
        into, flat, first = blocks.numpy(), lines.numpy().reshape(-1), 0
        for block, count in zip(into, self.counts, strict=True):
            size = count * width
            block[end - size : end] = flat[first : first + size]
            first += size

    def gathered(self, moves: Movements, out: torch.Tensor | None = None) -> Parcel:
        """The same in memory of its own (``out`` ``[>= N, H]``), in order: the caller may change its tensors."""
        total = sum(self.counts)
        if self.rows is None:
            return self._replace(table=self.table[:total])
        if out is None:
            out = self.table.new_empty(total, self.table.shape[1])
        moves.gather_blocks(self.table, self.rows, out, [total], [0])
        return Parcel(out[:total], None, self.counts, None if self.meta is None else self._gathered(self.meta))

    def _gathered(self, table: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return table
        return table.index_select(0, *tensors_at(table, self.rows))
