"""What every rank tells every other in each round, in a fixed number of bytes."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...substrate.control import REASON_BYTES, Operation

Bytes = npt.NDArray[np.uint8]


class Kind(enum.IntEnum):
    """What a message is."""

    WAITING = 1  # nothing to send: waits for this phase of this step
    READY = 2  # sends its rows of this phase
    FAILED = 3  # gives this step up, in this phase
    IDLE = 4  # nothing to send, and waits for nothing: only keeps rounds going


class Inline(enum.IntEnum):
    """What of a READY is in the same block; the rest follows in exchanges of their own."""

    NOTHING = 0
    ROUTING = 1
    ROWS = 2  # and their routing


class Status(NamedTuple):
    """One rank's message.

    Attributes:
        kind, step, operation: what it says, of which phase of which step.
        topk, dtype: ``K`` and the code of the rows' dtype, where READY.
        inline: what is in the same block.
        origin, reason: the rank whose mistake it was, and its text, where FAILED.
        counts: ``[W]`` rows for each rank, where READY.
    """

    kind: Kind
    step: int
    operation: Operation
    topk: int = 0
    dtype: int = 0
    inline: Inline = Inline.ROWS
    origin: int = 0
    reason: str = ""
    counts: tuple[int, ...] = ()

    @property
    def call(self) -> str:
        return f"{self.operation.name.lower()} of step {self.step}"


# Cheaper to read than the types.
_KINDS = {each.value: each for each in Kind}
_OPERATIONS = {each.value: each for each in Operation}
_INLINES = {each.value: each for each in Inline}


class StrangerError(Exception):
    """A block that is not of this Fleet, or not of this round."""


class StatusCodec:
    """Statuses as bytes, for one Fleet.

    Args:
        fleet_id: is in every status, so that another Fleet's are told apart.
    """

    _FIXED = 10

    def __init__(self, fleet_id: int, world_size: int) -> None:
        self._fleet_id, self._world = fleet_id, world_size
        self._words = self._FIXED + world_size
        self.size = 8 * self._words + REASON_BYTES
        self._nobody = (0,) * world_size

    def encode(self, round_: int, status: Status) -> Bytes:
        """``[size]`` bytes."""
        text = status.reason.encode("utf-8", "replace")[:REASON_BYTES]
        raw = np.zeros(self.size, np.uint8)
        raw[: 8 * self._words].view(np.int64)[:] = (
            self._fleet_id, round_, status.kind, status.step, status.operation, status.topk, status.dtype,
            status.inline, status.origin, len(text), *(status.counts or self._nobody),
        )  # fmt: skip
        if text:
            raw[8 * self._words : 8 * self._words + len(text)] = np.frombuffer(text, np.uint8)
        return raw

    def decode(self, round_: int, raw: Bytes) -> list[Status]:
        """One status for each line of ``[W, size]`` bytes.

        Raises:
            StrangerError: a line is not of this Fleet and round.
        """
        words = np.ascontiguousarray(raw[:, : 8 * self._words]).view(np.int64).tolist()
        statuses = []
        for line, numbers in enumerate(words):
            fleet, number, kind, step, operation, topk, dtype, inline, origin, length = numbers[: self._FIXED]
            if (fleet, number) != (self._fleet_id, round_):
                raise StrangerError(f"round {number} of Fleet {fleet} met round {round_} of Fleet {self._fleet_id}")
            text = bytes(raw[line, 8 * self._words : 8 * self._words + length]) if length else b""
            statuses.append(
                Status(
                    _KINDS[kind], step, _OPERATIONS[operation], topk, dtype, _INLINES[inline], origin,
                    text.decode("utf-8", "replace"), tuple(numbers[self._FIXED :]),
                )
            )  # fmt: skip
        return statuses
