"""What a run says: records of what was measured, and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.table import Table

from .cases import GLOO_RAW, PHASES, payload
from .comm import CaseResult, CommPlan
from .layers import LayerCase
from .records import CommRecord, LayerRecord, ModelRecord, Record, build

T = TypeVar("T")


def records(plan: CommPlan, result: CaseResult) -> list[Record]:
    """All records of one case of ``bench comm`` or ``bench layer``."""
    case, facts = result.case, plan.facts(result.case)
    seconds = {
        name: {phase: of for phase, of in zip(case.phases, times.T) if not np.isnan(of).any()}
        for name, times in result.seconds.items()
    }
    valid = {name: error <= 1 for name, error in result.errors.items()}
    if isinstance(case, LayerCase):
        return [*build(LayerRecord, facts, seconds, valid)]
    moved, raw = payload(case), result.medians_us(GLOO_RAW)

    def more(name: str, phase: str, median_us: float) -> dict[str, Any]:
        return {
            "bytes": moved[phase].mean,
            "bytes_busiest_rank": moved[phase].most,
            "ratio_to_gloo_raw": round(median_us / raw[phase], 4) if raw else None,
        }

    return [*build(CommRecord, facts, seconds, valid, more)]


def headline(record: Record) -> str:
    """What all records of a run have in common, in a few lines."""
    r, machine = record, record.host
    sizes, how = "", f"µs of the slowest rank, median of {r.steps} steps"
    if isinstance(r, CommRecord):
        sizes = f"{r.experts} experts, top-{r.topk} {r.routing}, H {r.hidden}"
        how += "; MB sent to other ranks, both ways"
    elif isinstance(r, LayerRecord):
        sizes = f"{r.model}: {r.experts} experts, top-{r.topk} {r.routing}, H {r.hidden}, I {r.intermediate}"
    elif isinstance(r, ModelRecord):
        sizes = f"{r.model}: batch {r.batch}, {r.prompt_tokens} tokens and {r.new_tokens} new ones"
        how = f"ms, median of {r.rounds} runs; phases of a decode step, all blocks together, mean of the ranks"
    on = f"{machine['cpu']}, {machine['cores']} cores"
    if r.device == "cuda":
        on = f"{machine['gpus']} x {machine['gpu']}"
    return f"{sizes} {r.dtype}\n{on}, torch {machine['torch']}\n{how}"


def tables(found: Sequence[Record]) -> Iterator[Table]:
    """One for each world and layout, with a line for each candidate and token count."""
    for world, layout in unique((r.world, r.layout) for r in found):
        mine = [r for r in found if (r.world, r.layout) == (world, layout)]
        threads = "1 thread" if mine[0].threads == 1 else f"{mine[0].threads} threads"
        title = f"{layout}, {world} ranks of {'a GPU' if mine[0].device == 'cuda' else threads}"
        padding, columns, line_of = _SHOWN[mine[0].what]
        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, padding), pad_edge=False)
        for name in ("tokens", "transport", *columns):
            shown.add_column(name, justify="left" if name == "transport" else "right", no_wrap=True)
        for tokens in unique(r.tokens for r in mine):
            for place, line in enumerate(_lines([r for r in mine if r.tokens == tokens], line_of)):
                shown.add_row("" if place else str(tokens), *line)
            shown.add_section()
        yield shown


def unique(values: Iterable[T]) -> list[T]:
    """Each value once, in the order of their first appearance."""
    return list(dict.fromkeys(values))


def by_candidate(found: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The records of one case by candidate and phase."""
    return {name: {r.phase: r for r in found if r.transport == name} for name in unique(r.transport for r in found)}


def _lines(found: Sequence[Record], line_of: Any) -> Iterator[tuple[str, ...]]:
    for name, phases in by_candidate(found).items():
        wrong = any(r.valid is False for r in phases.values())
        yield f"[red]{name} WRONG[/]" if wrong else name, *line_of(phases)


def _comm_line(phases: dict[str, Any]) -> Iterator[str]:
    both = phases["both"]
    yield from (f"{phases[phase].median_us:.0f}" for phase in PHASES)
    yield f"{both.p99_us:.0f}"
    yield f"{both.bytes / 1e6:.2f}"
    yield "" if both.ratio_to_gloo_raw is None else f"{1 / both.ratio_to_gloo_raw:.2f}×"


def _layer_line(phases: dict[str, Any]) -> Iterator[str]:
    total = phases["total"]
    yield from (f"{phases[phase].median_us:.0f}" if phase in phases else "" for phase in LayerCase.phases)
    yield f"{total.p99_us:.0f}"
    yield f"{1 / total.ratio_to_first:.2f}×"


def _model_line(phases: dict[str, Any]) -> Iterator[str]:
    yield f"{phases['run'].tokens_per_second:.0f}"
    yield f"{1 / phases['run'].ratio_to_first:.2f}×"
    for phase in ("decode", "route", "dispatch", "compute", "combine", "rest"):
        yield f"{phases[phase].median_us / 1000:.2f}" if phase in phases else ""


_SHOWN = {
    "comm": (1, (*PHASES, "p99", "MB", "vs gloo-raw"), _comm_line),
    "layer": (0, (*LayerCase.phases, "p99", "speed"), _layer_line),
    "model": (
        0,
        ("tokens/s", "speed", "decode", "route", "dispatch", "compute", "combine", "rest"),
        _model_line,
    ),
}
