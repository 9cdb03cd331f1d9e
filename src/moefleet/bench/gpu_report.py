"""What a run on GPUs says: records for machines, a table and a picture for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from .cases import CommCase, payload
from .gpu import GpuRun
from .records import host


@dataclass(frozen=True)
class GpuRecord:
    """One candidate in one case; microseconds of the slowest rank, ``None`` where something was not measured.

    Attributes:
        graph_us, eager_us: update, dispatch and combine with another routing in each step.
        dispatch_us, combine_us: its phases, between events, the update in the first.
        ratio: ``graph_us`` (``eager_us`` where one of the two has no graph) by that of the first candidate.
        bytes: rows that a rank sends to others, there and back, mean over ranks.
        floor_us: what these bytes take at ``push_gbps``, which the run measured in one direction while all pushed.
        floor_share: ``floor_us / graph_us``.
        valid: whether its output was right before and after.
    """

    candidate: str
    layout: str
    world: int
    tokens: int
    routing: str
    hidden: int
    experts: int
    topk: int
    dtype: str
    graph_us: float | None
    eager_us: float | None
    dispatch_us: float | None
    combine_us: float | None
    ratio: float | None
    bytes: int
    push_gbps: float | None
    floor_us: float | None
    floor_share: float | None
    error: float
    valid: bool
    gpu: str
    host: dict[str, Any]


def gpu_records(run: GpuRun) -> list[GpuRecord]:
    """All records, case by case."""
    found = []
    for result in run.results:
        case, names = result.case, list(result.timed)
        for name in names:
            timed, first = result.timed[name], result.timed[names[0]]
            pairs = ((timed.graph, first.graph), (timed.eager, first.eager))
            ratio = next((mine / other for mine, other in pairs if not math.isnan(mine / other)), math.nan)
            sent = payload(case)["both"].mean
            floor = sent / run.push_gbps / 1e3 if run.push_gbps else math.nan
            found.append(
                GpuRecord(
                    candidate=name,
                    layout=case.layout.value,
                    world=case.world,
                    tokens=case.tokens,
                    routing=case.routing.value,
                    hidden=case.hidden,
                    experts=case.experts,
                    topk=case.topk,
                    dtype=str(case.dtype).removeprefix("torch."),
                    graph_us=_rounded(timed.graph),
                    eager_us=_rounded(timed.eager),
                    dispatch_us=_rounded(timed.dispatch),
                    combine_us=_rounded(timed.combine),
                    ratio=_rounded(ratio, 4),
                    bytes=sent,
                    push_gbps=_rounded(run.push_gbps or math.nan, 1),
                    floor_us=_rounded(floor),
                    floor_share=_rounded(floor / timed.graph, 4),
                    error=timed.error,
                    valid=timed.error <= 1,
                    gpu=run.gpu,
                    host=host(),
                )
            )
    return found


def gpu_json(found: Sequence[GpuRecord], run: GpuRun) -> str:
    """A JSON list of objects, one for each record; those left out have ``left_out``, the reason."""
    skipped = [
        {"candidate": name, **_sizes(result.case), "left_out": reason}
        for result in run.results
        for name, reason in result.left_out.items()
    ]
    return json.dumps([*map(asdict, found), *skipped], indent=2) + "\n"


def gpu_table(found: Sequence[GpuRecord], run: GpuRun) -> Table:
    """A line for each candidate in each case."""
    link = f"; each rank pushes {run.push_gbps:.0f} GB/s" if run.push_gbps else ""
    table = Table(title=f"{run.gpu}{link}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("case", "candidate", "graph us", "eager us", "dispatch", "combine", "ratio", "floor us", "error"):
        table.add_column(column, justify="left" if column in ("case", "candidate") else "right", no_wrap=True)
    last = ""
    for r in found:
        name = f"{r.layout} T={r.tokens} {r.routing}"
        if last not in ("", name):
            table.add_section()
        table.add_row(
            "" if name == last else name,
            r.candidate if r.valid else f"[red]{r.candidate} WRONG[/]",
            *(_shown(us) for us in (r.graph_us, r.eager_us, r.dispatch_us, r.combine_us)),
            "" if r.ratio is None else f"{r.ratio:.2f}",
            _shown(r.floor_us),
            f"{r.error:.2g}",
        )
        last = name
    return table


def gpu_plot(found: Sequence[GpuRecord], path: Path) -> None:
    """A panel for each case: a bar for each candidate, and a line at what the links alone would take. The axis is
    logarithmic where bars would not be seen beside others."""
    cases = list(dict.fromkeys((r.layout, r.tokens, r.routing) for r in found))
    from matplotlib.figure import Figure

    across = min(len(cases), 4)
    down = -(-len(cases) // across)
    picture = Figure(layout="constrained", figsize=(3.2 * across, 3.6 * down))
    for place, key in enumerate(cases, 1):
        axes = picture.add_subplot(down, across, place)
        mine = [r for r in found if (r.layout, r.tokens, r.routing) == key]
        heights = [r.graph_us or r.eager_us or 0.0 for r in mine]
        bars = axes.bar(range(len(mine)), heights, color=["#2a6f97", *["#9a9a9a"] * (len(mine) - 1)])
        axes.bar_label(bars, [f"{h:.0f}" + ("" if r.graph_us else " eager") for h, r in zip(heights, mine)], fontsize=7)
        axes.set_xticks(range(len(mine)), [r.candidate for r in mine], rotation=30, ha="right", fontsize=7)
        axes.set_title(f"{key[0]}, T = {key[1]}, {key[2]}", fontsize=8)
        if max(heights) > 20 * min(heights):
            axes.set_yscale("log")
        if mine[0].floor_us:
            axes.axhline(mine[0].floor_us, color="#e07a5f", linestyle="--", linewidth=1, label="links alone")
            axes.legend(fontsize=7)
        if place % across == 1 % across:
            axes.set_ylabel("µs per step, slowest rank")
    picture.savefig(path, dpi=150)


def _sizes(case: CommCase) -> dict[str, Any]:
    return {"layout": case.layout.value, "tokens": case.tokens, "world": case.world, "routing": case.routing.value}


def _rounded(value: float, digits: int = 2) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _shown(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"
