"""How large the blocks of a round are: large enough for what usually comes, so that a phase takes one round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .status import Status

_LARGEST = 2 << 20  # above this a second collective costs little beside the rows themselves
_LARGEST_IN_ALL = 32 << 20
_PADDING = 64 << 10  # for each block: what is sent for nothing rather than issuing a second collective
_MEMORY = 4


class BlockSize:
    """The same on all ranks, as it follows what all of them read in the log: the largest of the last dispatches.

    Attributes:
        capacity: bytes of a block, a multiple of the size of a row, status included.
        look: bytes before the status that may hold routing, for a host that has to copy them from a GPU.
    """

    def __init__(self, world_size: int, head: int, row_bytes: int) -> None:
        self._world, self._head, self._row = world_size, head, row_bytes
        self._recent: deque[int] = deque([0], maxlen=_MEMORY)
        self.look = 0
        self.capacity = self._rounded(0)

    def follow(self, statuses: Sequence[Status], meta_bytes: Sequence[int]) -> None:
        """Learn from a complete dispatch: every rank's status, and the routing bytes beside each of its rows."""
        sizes = [max(s.counts) * (self._row + meta) for s, meta in zip(statuses, meta_bytes, strict=True)]
        total = sum(sum(s.counts) * (self._row + meta) for s, meta in zip(statuses, meta_bytes, strict=True))
        largest, blocks = max(sizes), self._world**2
        worth = (
            largest <= min(_LARGEST, _LARGEST_IN_ALL // self._world)
            and largest * blocks <= 2 * total + _PADDING * blocks
        )
        self._recent.append(largest if worth else 0)
        payload = max(self._recent)
        self.capacity = self._rounded(payload + payload // 8)
        self.look = (self.capacity // self._row) * max(meta_bytes)

    def _rounded(self, payload: int) -> int:
        rows = -(-(payload + self._head) // self._row)
        return rows * self._row
