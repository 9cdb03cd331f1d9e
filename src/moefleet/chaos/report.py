"""What one round showed: its timeline, how long each part took, and whether anything that may never happen did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Moment:
    """Something that happened: seconds after the first fault, in words, of what kind, and to which rank (or -1)."""

    at_s: float
    what: str
    kind: str
    rank: int = -1


@dataclass
class RoundReport:
    """One round.

    Attributes:
        plan: in words.
        timeline: in the order of time.
        rows: delivered and compared with the reference, by all ranks.
        wrong: those that differed.
        disagreements: pairs of masks that ranks held under the same epoch, or delivered the same step under.
        hangs: waits of the supervisor that did not end in time.
        leaked: processes or segments that outlived what they belonged to.
        errors: what ranks raised that no plan accounts for.
        no_quorum: calls that ended so: too many ranks were away at once.
        evicted_healthy: ranks given up on that nothing had been done to: slow ones, on a busy machine.
        fault: kinds of what was done, in order.
        first_flag_s, last_flag_s: seconds from the first fault to the first and the last survivor's flag.
        agreed_s, degraded_s, recovered_s: seconds from the fault to the last rank's first mask, first verified
            degraded step, and first verified step at full strength; ``None`` where there was none.
        seconds: of the whole round.
    """

    plan: str
    timeline: list[Moment] = field(default_factory=list)
    rows: int = 0
    steps: int = 0
    wrong: int = 0
    disagreements: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    no_quorum: int = 0
    evicted_healthy: int = 0
    fault: str = ""
    first_flag_s: float | None = None
    last_flag_s: float | None = None
    agreed_s: float | None = None
    degraded_s: float | None = None
    recovered_s: float | None = None
    seconds: float = 0.0

    @property
    def unsafe(self) -> bool:
        """Whether a wrong row was delivered or ranks disagreed."""
        return bool(self.wrong or self.disagreements)

    @property
    def clean(self) -> bool:
        return not (self.unsafe or self.hangs or self.leaked or self.errors)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"clean": self.clean}


@dataclass
class Totals:
    """Counts over many rounds."""

    rounds: int = 0
    rows: int = 0
    wrong: int = 0
    disagreements: int = 0
    hangs: int = 0
    leaked: int = 0
    errors: int = 0
    no_quorum: int = 0
    evicted_healthy: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, rounds: Sequence[dict[str, Any]]) -> Totals:
        """Over rounds as JSON values."""

        def count(name: str) -> int:
            return sum(len(r[name]) if isinstance(r[name], list) else r[name] for r in rounds)

        return cls(
            len(rounds), count("rows"), count("wrong"), count("disagreements"), count("hangs"), count("leaked"),
            count("errors"), count("no_quorum"), count("evicted_healthy"), sum(r["seconds"] for r in rounds),
        )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def by_fault(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, list[float]]:
    """Durations of this name in seconds, by what was done."""
    found: dict[str, list[float]] = {}
    for each in rounds:
        if each[name] is not None and each["fault"]:
            found.setdefault(each["fault"], []).append(each[name])
    return dict(sorted(found.items()))


def markdown(rounds: Sequence[dict[str, Any]]) -> str:
    """Totals and durations as tables."""
    totals = Totals.of(rounds)
    lines = ["| rounds | rows compared | wrong rows | disagreements | hangs | leaks | errors | healthy ranks evicted |"]
    lines.append("|" + " ---: |" * 8)
    t = totals
    counts = (t.rounds, t.rows, t.wrong, t.disagreements, t.hangs, t.leaked, t.errors, t.evicted_healthy)
    lines.append("| " + " | ".join(f"{count:,}" for count in counts) + " |")
    lines += ["", "| fault | from the first fault to | rounds | median ms | 95% ms | longest ms |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for name, words in DURATIONS.items():
        for fault, values in by_fault(rounds, name).items():
            ms = [1000 * value for value in (quantile(values, 0.5), quantile(values, 0.95), max(values))]
            lines.append(f"| {fault} | {words} | {len(values)} | " + " | ".join(f"{each:.1f}" for each in ms) + " |")
    return "\n".join(lines) + "\n"


DURATIONS = {
    "first_flag_s": "first rank's flag",
    "last_flag_s": "last rank's flag",
    "agreed_s": "last rank's mask",
    "degraded_s": "degraded step verified everywhere",
    "recovered_s": "full strength verified everywhere",
}
