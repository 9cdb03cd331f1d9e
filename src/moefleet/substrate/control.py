"""The control block that each rank writes and all peers read, and the header of one phase of a step.

A block is an array of 64-bit words at the start of a rank's segment. Polled words have a cache line each.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WORDS_PER_LINE = 8
SETS = 2
"""Alternating buffer sets: step ``s`` uses set ``s % SETS``, so at most this many steps are open."""


class Word(enum.IntEnum):
    """Index of a word in the control block."""

    MAGIC = 0
    INCARNATION = 1
    GENERATION = 2
    ROUND = 3
    STATE = 4
    STEP = 5
    OPERATION = 6
    WAITING_ON = 7  # rank + 1 while asleep, 0 otherwise
    WAITING_STEP = 8
    WAITING_OPERATION = 9
    FAILED = 10  # and 11, one for each set: 4 * step + the first phase of it that this rank gave up, 0 before any
    COMBINING = 12  # last step for which this rank began to write combined rows; good with fault tolerance only
    BEGAN = 13  # when it began its last step, and
    CORE = 14  # on which core it committed last: both said and read by the compiled helper only


MAGIC = 0x6D6F65666C656574  # "moefleet"
BLOCK_BYTES = 1024


class State(enum.IntEnum):
    """What a rank says about itself."""

    RUNNING = 1
    FAILED_STEP = 2
    IN_ROUND = 3
    DEPARTED = 4


class Operation(enum.IntEnum):
    """The phases of a step that a rank commits."""

    NONE = 0
    DISPATCH = 1
    COMBINE = 2
    CLOSED = 3  # done with the step, well or badly: its buffers are no longer read
    ROUTES = 4  # part of dispatch: the routing can be read, while rows are still to come

    @property
    def phase(self) -> Operation:
        """The phase that this belongs to: its header, and what a user calls it."""
        return Operation.DISPATCH if self is Operation.ROUTES else self

    @classmethod
    def read(cls, word: int) -> Operation:
        """What stands in a word that a peer wrote, which may be anything."""
        return cls(word) if 0 <= word <= cls.ROUTES else cls.NONE


_FLAGS = tuple(tuple((2 + phase * SETS + s - SETS) * WORDS_PER_LINE for s in range(SETS)) for phase in Operation)


def flag_word(operation: Operation, step: int) -> int:
    """Word that commits this phase of this step; it then holds ``step``."""
    return _FLAGS[operation][step % SETS]


REASON_BYTES = 512
MASK_BYTES = 32
MAX_RANKS = MASK_BYTES * 8
_HEADER = struct.Struct(f"<9q{MASK_BYTES}s2q")
HEADER_BYTES = 1024
_REASON_AT = HEADER_BYTES - REASON_BYTES
TOKENS_AT = _HEADER.size - 16
"""Byte at which a header holds ``tokens``. All before it is equal on ranks that are in the same call, and agree."""


@lru_cache(maxsize=1024)
def as_bits(ranks: int) -> bytes:
    """A set of ranks, bit ``r`` set where rank ``r`` belongs to it, as headers and the compiled helper hold it."""
    return ranks.to_bytes(MASK_BYTES, "little")


def as_flags(ranks: int, world_size: int) -> npt.NDArray[np.bool_]:
    """``[W]`` whether each rank belongs to a set of ranks: more than an integer of NumPy has bits for."""
    bits = np.frombuffer(as_bits(ranks), np.uint8)
    return np.unpackbits(bits, count=world_size, bitorder="little").view(np.bool_)


class Header(NamedTuple):
    """What stands before a rank's data of one phase.

    Attributes:
        generation, round, step: where in the Fleet's life this was written.
        operation: the call that wrote it.
        tokens, topk: ``T`` and ``K`` of the step.
        dtype: code of the rows' dtype (see ``rowtypes.py``), 0 for none.
        failed: whether the writer gave this step up; then no data follows.
        origin: the rank whose mistake it was, where ``failed``.
        reason: its text, where ``failed``.
        mask: the writer's mask, bit ``r`` set where rank ``r`` is active.
        placed: 1, or 2 where there are two such places, if the rows of this phase lie where they are used, instead of
            where they are fetched from; else 0.
    """

    generation: int
    round: int
    step: int
    operation: Operation
    tokens: int = 0
    topk: int = 0
    dtype: int = 0
    failed: bool = False
    origin: int = 0
    reason: str = ""
    mask: int = 0
    placed: int = 0

    def write(self, memory: memoryview, offset: int) -> None:
        """Store at this byte offset; the phase's flag commits it."""
        text = self.reason.encode("utf-8", "replace")[:REASON_BYTES] if self.reason else b""
        _HEADER.pack_into(
            memory, offset, self.generation, self.round, self.step, self.operation, self.topk, self.dtype,
            self.failed, self.origin, len(text), as_bits(self.mask), self.tokens,
            self.placed,
        )  # fmt: skip
        if text:
            memory[offset + _REASON_AT : offset + _REASON_AT + len(text)] = text

    @classmethod
    def read(cls, memory: memoryview, offset: int) -> Header:
        """Read a committed header. Nothing here is trusted further than as numbers and text."""
        g, r, s, op, topk, dtype, failed, origin, length, mask, tokens, placed = _HEADER.unpack_from(memory, offset)
        text = ""
        if failed:
            at = offset + _REASON_AT
            text = bytes(memory[at : at + min(max(length, 0), REASON_BYTES)]).decode("utf-8", "replace")
        active = int.from_bytes(mask, "little")
        operation = Operation.read(op)
        return cls(g, r, s, operation, tokens, topk, dtype, bool(failed), origin, text, active, placed)
