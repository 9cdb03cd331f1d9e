"""What a rank gets in one phase: rows of every rank, where they came with its status or followed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...substrate.routes import Ints
from .parcel import Parcel
from .status import Bytes, Inline, Status
from .wire import Flight, Wire


class Part(NamedTuple):
    """What one rank sent us.

    Attributes:
        base: uint8 ``[bytes]``, memory that the rows lie in.
        first: the row of ``base`` at which they begin.
        rows: how many they are.
        meta, meta_at: in dispatch, uint8 ``[bytes]``, and where in it the routing of the first row begins.
        seen: the same routing ``[count, B]``, for the host.
        held: what keeps this memory from being used again.
    """

    base: torch.Tensor
    first: int
    rows: int
    meta: torch.Tensor
    meta_at: int = 0
    seen: Bytes | None = None
    held: object = None


class Delivery(NamedTuple):
    """One phase, as all ranks sent it; valid once the flights are done. Sequences are indexed by rank."""

    statuses: list[Status]
    parts: list[Part]
    flights: Sequence[Flight] = ()

    def table(self, dtype: torch.dtype, hidden: int) -> tuple[torch.Tensor, Ints]:
        """All rows in one table ``[many, H]``, and where each rank's begin in it."""
        base = next((part.base for part in self.parts if part.rows), None)
        if base is None:
            return self.parts[0].base[:0].view(dtype).view(0, hidden), np.zeros(len(self.parts), np.int64)
        if all(part.base is base or not part.rows for part in self.parts):
            return base.view(dtype).view(-1, hidden), np.array([part.first for part in self.parts])
        rows = [p.base.view(dtype).view(-1, hidden)[p.first : p.first + p.rows] for p in self.parts]
        return torch.cat(rows), self.edges[:-1]

    @property
    def edges(self) -> Ints:
        """``[W+1]``: where each rank's rows begin if all lie one after the other."""
        return np.cumsum([0, *(part.rows for part in self.parts)])

    def routing(self, topk: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and weights ``[N, K]`` of all rows, for the host."""
        lines = np.concatenate([part.seen for part in self.parts if part.seen is not None])
        ids, weights = lines[:, : 4 * topk].copy(), lines[:, 4 * topk : 8 * topk].copy()
        return ids.view(np.int32), weights.view(np.float32)

    def scales(self, after: int, width: int) -> torch.Tensor:
        """Uint8 ``[N, S]`` of all rows: what comes after this many bytes in meta rows of ``width`` bytes."""
        lines = [part.meta[part.meta_at : part.meta_at + part.rows * width].view(-1, width) for part in self.parts]
        return torch.cat([line[:, after:] for line in lines])

    def lend(self, wire: Wire) -> None:
        """The current stream is going to read all this."""
        wire.lend({part.base for part in self.parts} | {part.meta for part in self.parts})


def follow_up(
    wire: Wire,
    rank: int,
    parcel: Parcel | None,
    statuses: Sequence[Status],
    widths: Sequence[int],
    rows: torch.Tensor,
) -> tuple[list[Part], list[Flight]]:
    """Issue the exchanges of what did not fit into blocks, and say where each rank's is going to lie.

    Args:
        rank: this rank; ``parcel``: what it sends in this way, if anything.
        statuses: every rank's.
        widths: bytes of each rank's meta rows, 0 if there are none in this phase.
        rows: uint8 ``[N, row bytes]`` to receive into.
    """
    counts = [0 if status.inline is Inline.ROWS else status.counts[rank] for status in statuses]
    widths = [width if s.inline is Inline.NOTHING else 0 for width, s in zip(widths, statuses, strict=True)]
    ours = [0] * len(counts) if parcel is None else list(parcel.counts)
    mark = [wire.mark(), None if parcel is None else parcel.mark]
    source = wire.empty(0, rows.shape[1]) if parcel is None else parcel.table.view(torch.uint8)
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    meta = wire.empty(sum(sizes))
    flights, seen = list[Flight](), np.empty(0, np.uint8)
    if any(widths):  # K may differ between ranks, so these are counted in bytes
        lines = wire.empty(0)
        if parcel is not None and parcel.meta is not None and widths[rank]:
            lines = parcel.meta.reshape(-1)
        flights.append(wire.exchange(meta, lines, sizes, [n * widths[rank] for n in ours], look=meta, after=mark))
        seen = flights[-1].seen
    flights.append(wire.exchange(rows, source, counts, ours, after=mark))  # last, as it takes no more memory
    base, parts, first, at = rows.view(-1), [], 0, 0
    for count, width, size in zip(counts, widths, sizes, strict=True):
        told = seen[at : at + size].reshape(count, width) if width else None
        parts.append(Part(base, first, count, meta, at, told))
        first, at = first + count, at + size
    return parts, flights
