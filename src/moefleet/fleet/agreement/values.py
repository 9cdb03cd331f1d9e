"""What ranks post and decide, as frozen values, and as the text that the store holds.

Sets of ranks are integers: bit ``r`` is rank ``r``. In masks 1 is active, in accusations 1 is accused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a call, and the round that it takes part in, is for."""

    RECONCILE = "reconcile"
    READMIT = "readmit"


@dataclass(frozen=True)
class View:
    """What one rank says in one round.

    Attributes:
        rank: who says it.
        accused: ranks that this rank's own transport gave up on.
        step: the last step that this rank began; -1 before the first.
        incarnation: which life of the rank this is, for whoever reads the store.
        kind: what the rank called for.
    """

    rank: int
    accused: int
    step: int
    incarnation: int
    kind: Kind


@dataclass(frozen=True)
class Decision:
    """One entry of the history, written once. Number 0 is where everybody starts and is never written.

    Attributes:
        number: its place in the history; the epoch of a mask is the number of its decision.
        kind: of the round that made it.
        mask: ranks that it leaves active.
        resume_step: the step at which all of them go on.
    """

    number: int
    kind: Kind
    mask: int
    resume_step: int


def everybody(world: int) -> int:
    """All ranks."""
    return (1 << world) - 1


def first_decision(world: int) -> Decision:
    """What ranks hold before the first round: all are active, and nothing has run."""
    return Decision(0, Kind.RECONCILE, everybody(world), 0)


def bit_set(ranks: Iterable[int]) -> int:
    """Ranks as bits."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def members(bits: int) -> Iterator[int]:
    """The ranks of a set, lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def mask_list(bits: int, world: int) -> tuple[int, ...]:
    """A mask as users see it: one int per rank, 1 = active."""
    return tuple(bits >> rank & 1 for rank in range(world))


def encode_view(view: View) -> str:
    """One record of a round's log; records are appended, so each ends with its own mark."""
    return f"{view.rank} {view.accused:x} {view.step} {view.incarnation} {view.kind.value};"


def decode_views(log: str) -> tuple[View, ...]:
    """The last record of each rank, lowest rank first. Raises ValueError for text that is no log."""
    latest: dict[int, View] = {}
    for record in log.split(";")[:-1]:
        rank, accused, step, incarnation, kind = record.split(" ")
        latest[int(rank)] = View(int(rank), int(accused, 16), int(step), int(incarnation), Kind(kind))
    return tuple(latest[rank] for rank in sorted(latest))


def encode_decision(decision: Decision) -> str:
    """The value of a decision's key. The number is in the key."""
    return f"{decision.kind.value} {decision.mask:x} {decision.resume_step}"


def decode_decision(number: int, text: str) -> Decision:
    """Raises ValueError for text that is no decision."""
    kind, mask, resume_step = text.split(" ")
    return Decision(number, Kind(kind), int(mask, 16), int(resume_step))
