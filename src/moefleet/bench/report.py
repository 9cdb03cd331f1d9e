"""What a run says: records for machines, a table for people."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table

from .._version import __version__
from ..launch.pool import usable_cores
from .cases import PHASES, payload
from .comm import CaseResult, CommPlan
from .cpu import GLOO_RAW


@dataclass(frozen=True)
class Record:
    """One phase of one transport in one case.

    Attributes:
        transport: its name, or gloo-raw, which is measured again in every case.
        phase: ``dispatch`` (with the handle's update), ``combine``, or ``both``: a whole step.
        median_us, p99_us: over ``steps`` timed steps, of the slowest rank in each.
        bytes: rows that a rank sends to other ranks, one for each (token, rank that serves it), mean over ranks;
            ``bytes_busiest_rank`` the most that one rank sends.
        ratio_to_first: ``median_us`` divided by that of the first transport of this case and phase.
        ratio_to_gloo_raw: the same against gloo-raw; ``None`` where that did not run.
        steps: timed steps in all, from ``rounds`` turns of this candidate, each after ``warmup`` untimed ones.
        valid: whether its output agreed with the reference; ``None`` where nobody looked.
        host: what it ran on.
    """

    transport: str
    layout: str
    world: int
    tokens: int
    phase: str
    median_us: float
    p99_us: float
    bytes: int
    bytes_busiest_rank: int
    ratio_to_first: float
    ratio_to_gloo_raw: float | None
    dtype: str
    hidden: int
    experts: int
    topk: int
    routing: str
    combine_input: str
    steps: int
    rounds: int
    warmup: int
    threads: int
    valid: bool | None
    device: str
    host: dict[str, Any]


def records(plan: CommPlan, result: CaseResult) -> list[Record]:
    """All records of one case, transport by transport, the first one first."""
    case, names = result.case, list(result.seconds)
    medians = {name: np.median(seconds, axis=0) * 1e6 for name, seconds in result.seconds.items()}
    p99s = {name: np.percentile(seconds, 99, axis=0) * 1e6 for name, seconds in result.seconds.items()}
    moved, raw = payload(case), medians.get(GLOO_RAW)
    return [
        Record(
            transport=name,
            layout=case.layout.value,
            world=case.world,
            tokens=case.tokens,
            phase=phase,
            median_us=round(float(medians[name][column]), 2),
            p99_us=round(float(p99s[name][column]), 2),
            bytes=moved[phase].mean,
            bytes_busiest_rank=moved[phase].most,
            ratio_to_first=round(float(medians[name][column] / medians[names[0]][column]), 4),
            ratio_to_gloo_raw=None if raw is None else round(float(medians[name][column] / raw[column]), 4),
            dtype=str(case.dtype).removeprefix("torch."),
            hidden=case.hidden,
            experts=case.experts,
            topk=case.topk,
            routing=case.routing.value,
            combine_input=case.combine_input.value,
            steps=len(result.seconds[name]),
            rounds=plan.rounds,
            warmup=plan.warmup,
            threads=plan.threads or max(1, usable_cores() // case.world),
            valid=result.errors[name] <= 1 if name in result.errors else None,
            device="cpu",
            host=host(),
        )
        for name in names
        for column, phase in enumerate(PHASES)
    ]


@cache
def host() -> dict[str, Any]:
    """The machine and the software, and when this process began to measure."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moefleet": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()


def to_json(found: Iterable[Record]) -> str:
    """A JSON list of objects, one for each record."""
    return json.dumps([asdict(record) for record in found], indent=2) + "\n"


def headline(record: Record) -> str:
    """What all records of a run have in common, in a few lines."""
    r, machine = record, record.host
    threads = "1 thread" if r.threads == 1 else f"{r.threads} threads"
    return (
        f"{r.world} ranks, {r.experts} experts, top-{r.topk} {r.routing}, H {r.hidden} {r.dtype}\n"
        f"{machine['cpu']}, {machine['cores']} cores, {threads} per rank, torch {machine['torch']}\n"
        f"µs of the slowest rank, median of {r.steps} steps; MB sent to other ranks, both ways"
    )


def tables(found: Sequence[Record]) -> Iterator[Table]:
    """One for each layout, with a line for each transport and token count."""
    for layout in dict.fromkeys(r.layout for r in found):
        shown = Table(title=layout, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for name in ("tokens", "transport", *PHASES, "p99", "MB", "vs gloo-raw"):
            shown.add_column(name, justify="left" if name == "transport" else "right", no_wrap=True)
        mine = [r for r in found if r.layout == layout]
        for tokens in dict.fromkeys(r.tokens for r in mine):
            for place, line in enumerate(_lines([r for r in mine if r.tokens == tokens])):
                shown.add_row("" if place else str(tokens), *line)
            shown.add_section()
        yield shown


def _lines(found: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(r.transport for r in found):
        phases = {r.phase: r for r in found if r.transport == name}
        both = phases["both"]
        yield (
            f"[red]{name} WRONG[/]" if both.valid is False else name,
            *(f"{phases[phase].median_us:.0f}" for phase in PHASES),
            f"{both.p99_us:.0f}",
            f"{both.bytes / 1e6:.2f}",
            "" if both.ratio_to_gloo_raw is None else f"{1 / both.ratio_to_gloo_raw:.2f}×",
        )
