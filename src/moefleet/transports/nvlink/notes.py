"""Why a rank gave a step up: a note that its host writes. Its ``fail`` kernel adds the step and brings it into the
peers' memory, before the flags; the host of a peer that learns of the failure reads it there."""

from __future__ import annotations

import torch

from ...substrate.control import HEADER_BYTES, SETS, Header, Operation
from .geometry import NOTE_WORDS, NOTES, ROUND_SHIFT, Geometry

AHEAD = 64
"""Notes that a host may write before the GPU has sent the first of them. A later one takes the place of the oldest."""


class Notes:
    """The notes of one rank, and those that it received.

    Args:
        own: this rank's shared memory, bytes.
    """

    def __init__(self, geometry: Geometry, own: torch.Tensor, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._geometry, self._own, self._device = geometry, own, device
        self._written = torch.zeros(AHEAD, NOTE_WORDS, dtype=torch.int64, pin_memory=pinned)
        self._bytes = self._written.numpy().data.cast("B")
        self._number = 0
        self._stream = torch.cuda.Stream(device)
        self._read = torch.zeros(HEADER_BYTES, dtype=torch.uint8, pin_memory=pinned)

    def write(self, operation: Operation, origin: int, reason: str) -> torch.Tensor:
        """A note for ``Engine.fail``, int64 ``[NOTE_WORDS]``.

        Args:
            operation: the phase in which peers find that the step was given up.
            origin, reason: whose mistake it was, and its text.
        """
        at = self._number % AHEAD
        self._number += 1
        note = Header(0, 0, 0, operation, failed=True, origin=origin, reason=reason)
        note.write(self._bytes, at * HEADER_BYTES)
        return self._written[at]

    def read(self, rank: int, step: int) -> Header | None:
        """What ``rank`` said when it gave ``step`` up; ``None`` where a later note lies there. Waits for no kernel."""
        places, world = self._geometry.shared, self._geometry.world_size
        at = step % SETS * places.set_bytes + places.note + (step // SETS % NOTES * world + rank) * HEADER_BYTES
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._read.copy_(self._own[at : at + HEADER_BYTES], non_blocking=True)
        self._stream.synchronize()
        note = Header.read(self._read.numpy().data, 0)
        return note if note.failed and note.step % (1 << ROUND_SHIFT) == step else None
