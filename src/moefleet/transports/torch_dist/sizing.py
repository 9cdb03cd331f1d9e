"""How large the blocks of a round are: large enough for what usually comes, so that a phase takes one round. Where rows
are too many for that, their routing alone has its place there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .status import Status

_LARGEST = 2 << 20  # above this a second collective costs little beside the rows themselves
_LARGEST_IN_ALL = 32 << 20
_PADDING = 64 << 10  # for each block: what is sent for nothing rather than issuing a second collective
_SLACK = 8  # a part of what was needed is added
_MEMORY = 4


class BlockSize:
    """The same on all ranks, as it follows what all of them read in the log: the largest of the last dispatches.

    Args:
        head: bytes of a status.
        row_bytes: of the larger of the two ways.
        most: bytes that a rank has for another in a phase at most: no slack is added beyond them.

    Attributes:
        capacity: bytes of a block, a multiple of the size of a row, status included.
        look: bytes before the status that may hold routing, for a host that has to copy them from a GPU.
    """

    def __init__(self, world_size: int, head: int, row_bytes: int, most: int) -> None:
        self._world, self._head, self._row, self._most = world_size, head, row_bytes, most
        self._recent: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_MEMORY)
        self.look = 0
        self.capacity = self._rounded(0)

    def follow(self, statuses: Sequence[Status], meta_bytes: Sequence[int]) -> None:
        """Learn from a complete dispatch: every rank's status, and the routing bytes beside each of its rows."""
        sizes = [max(s.counts) * (self._row + meta) for s, meta in zip(statuses, meta_bytes, strict=True)]
        total = sum(sum(s.counts) * (self._row + meta) for s, meta in zip(statuses, meta_bytes, strict=True))
        routing = max(max(s.counts) * meta for s, meta in zip(statuses, meta_bytes, strict=True))
        largest, blocks, limit = max(sizes), self._world**2, min(_LARGEST, _LARGEST_IN_ALL // self._world)
        worth = largest <= limit and largest * blocks <= 2 * total + _PADDING * blocks
        self._recent.append((largest if worth else routing if routing <= limit else 0, routing))
        needed = map(max, zip(*self._recent, strict=True))
        payload, routing = (max(size, min(size + size // _SLACK, self._most)) for size in needed)
        self.capacity = self._rounded(payload)
        self.look = min(routing, self.capacity - self._head)

    def _rounded(self, payload: int) -> int:
        rows = -(-(payload + self._head) // self._row)
        return rows * self._row
