"""What one round does: to whom, when, and how the Fleet gets back to full strength."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from ..config import EpLayout
from ..errors import config_error


class Kind(enum.Enum):
    """What is done to a rank."""

    KILL = "kill"  # SIGKILL
    TERM = "term"  # SIGTERM: it leaves in an orderly way
    STOP = "stop"  # SIGSTOP, until the round readmits it or for a number of seconds


class Recovery(enum.Enum):
    """How ranks that ended are made good; stopped ones are always readmitted."""

    REPLACE = "replace"
    SHRINK = "shrink"
    NONE = "none"


@dataclass(frozen=True)
class Fault:
    """One thing done to one rank.

    Attributes:
        rank: the victim.
        seconds: of a stop: when it goes on by itself; ``None``: when the round readmits it.
        delay_s: after the trigger.
        while_deciding: the trigger is not the step but the first survivor that enters a round.
    """

    kind: Kind
    rank: int
    seconds: float | None = None
    delay_s: float = 0.0
    while_deciding: bool = False

    def __str__(self) -> str:
        length = "" if self.seconds is None else f" for {self.seconds:g} s"
        return f"{self.kind.value} {self.rank}{length}" + (" while deciding" if self.while_deciding else "")


@dataclass(frozen=True)
class Plan:
    """One round.

    Attributes:
        world: ranks at the start.
        faults: in the order in which they happen.
        at_step: the step with whose end the first victims are hit.
        recovery: of ranks that ended.
        timeout_ms: silence after which a peer is accused.
        gather_s: longest wait for the view of a rank that is merely stopped.
    """

    world: int = 4
    faults: tuple[Fault, ...] = ()
    at_step: int = 20
    layout: EpLayout = EpLayout.EXPERT_MAJOR
    transport: str = "shm"
    recovery: Recovery = Recovery.REPLACE
    timeout_ms: int = 1000
    gather_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.world < 2:
            raise config_error("--world", self.world, "at least 2")
        if self.at_step < 1:
            raise config_error("--at-step", self.at_step, "at least 1")
        for fault in self.faults:
            if not 0 <= fault.rank < self.world:
                raise config_error(f"--{fault.kind.value}", fault.rank, f"ranks 0 to {self.world - 1}")
        if len(self.victims) != len(self.faults):
            raise config_error("faults", ", ".join(map(str, self.faults)), "one for each victim")
        if len(self.victims) >= self.world:
            raise config_error("faults", f"{len(self.victims)} victims", f"fewer than the {self.world} ranks")

    @property
    def victims(self) -> set[int]:
        return {fault.rank for fault in self.faults}

    @property
    def ended(self) -> set[int]:
        """Victims whose process ends."""
        return {fault.rank for fault in self.faults if fault.kind is not Kind.STOP}

    def __str__(self) -> str:
        how = f", {self.recovery.value}" if self.ended else ""
        return f"{', '.join(map(str, self.faults)) or 'nothing'} at step {self.at_step}{how}"


def parse_ranks(text: str) -> list[int]:
    """Ranks of an option such as ``1,2``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise config_error("rank", repr(text), "ranks separated by commas, such as 1,2") from None


def parse_stop(text: str) -> Fault:
    """``R`` or ``R:SECONDS``."""
    rank, _, seconds = text.partition(":")
    try:
        fault = Fault(Kind.STOP, int(rank), float(seconds) if seconds else None)
    except ValueError:
        raise config_error("--stop", repr(text), "a rank, or rank:seconds, such as 1 or 1:2.5") from None
    if fault.seconds is not None and not fault.seconds > 0:
        raise config_error("--stop", repr(text), "more than 0 seconds")
    return fault


def random_plan(seed: int, number: int, world: int, timeout_ms: int, transport: str = "shm") -> Plan:
    """Round ``number`` of a run: the same for the same arguments."""
    rng = random.Random(f"{seed}/{number}")
    ranks = rng.sample(range(world), world)
    first, second = ranks[0], ranks[1]
    silence = timeout_ms / 1000
    soon = rng.random() * 0.03
    lowest = min(rank for rank in range(world) if rank != first)
    choices: list[tuple[Fault, ...]] = [
        (Fault(Kind.KILL, first, delay_s=soon),),
        (Fault(Kind.TERM, first, delay_s=soon),),
        (Fault(Kind.STOP, first, delay_s=soon),),
        (Fault(Kind.STOP, first, seconds=rng.choice([0.3, 0.7, 1.5, 2.5]) * silence, delay_s=soon),),
        (Fault(Kind.KILL, first), Fault(Kind.KILL, lowest, while_deciding=True, delay_s=soon / 10)),
    ]
    if world > 2:
        choices += [
            (Fault(Kind.KILL, first), Fault(Kind.KILL, second, delay_s=soon)),
            (Fault(Kind.KILL, first), Fault(Kind.STOP, second, delay_s=soon)),
            (Fault(Kind.STOP, first), Fault(Kind.KILL, lowest, while_deciding=True, delay_s=rng.random() * silence)),
        ]
    faults = rng.choice([choice for choice in choices if len(choice) < world])
    layout = rng.choice(list(EpLayout))
    recovery = rng.choice([Recovery.REPLACE, Recovery.REPLACE, Recovery.SHRINK, Recovery.NONE])
    at_step = rng.randrange(3, 25)
    return Plan(world, faults, at_step, layout, transport, recovery, timeout_ms, seed=rng.randrange(2**20))
