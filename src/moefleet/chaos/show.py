"""Rounds on a terminal: one round's timeline, live or at its end, and the totals of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .report import DURATIONS, RoundReport, Totals, by_fault, quantile
from .supervisor import Supervisor

STYLES = {
    "fault": "bold red",
    "wrong": "bold white on red",
    "flag": "yellow",
    "no quorum": "magenta",
    "evicted": "magenta",
    "mask": "cyan",
    "degraded": "blue",
    "readmitted": "green",
    "moved": "green",
    "full": "bold green",
}


def timeline(report: RoundReport, last: int | None = None) -> Table:
    """What happened, in the order of time; the ``last`` moments of it, or all."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    moments = sorted(report.timeline, key=lambda moment: moment.at_s)
    for moment in moments[-last:] if last else moments:
        table.add_row(f"{1000 * moment.at_s:9.1f} ms", Text(moment.what, STYLES.get(moment.kind, "")))
    return table


def durations(report: RoundReport) -> Table:
    """From the fault to each stage."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for name, words in DURATIONS.items():
        seconds = getattr(report, name)
        if seconds is not None:
            table.add_row(f"fault to {words}", f"{1000 * seconds:.1f} ms")
    return table


def verdict(report: RoundReport) -> Text:
    """Whether the round was as it must be."""
    counted = f"{report.rows:,} rows of {report.steps:,} steps compared with the reference"
    if report.clean:
        return Text(f"{counted}: all right, and no two ranks ever disagreed.", "green")
    problems = [f"{report.wrong} wrong rows"] if report.wrong else []
    problems += [*report.disagreements, *report.hangs, *report.leaked, *report.errors]
    return Text("\n".join([f"{counted}. NOT as it must be:", *(f"  {each}" for each in problems)]), "bold red")


def whole(report: RoundReport) -> Group:
    """A round that is over."""
    return Group(Text(report.plan, "bold"), timeline(report), Text(), durations(report), Text(), verdict(report))


def live(supervisor: Supervisor) -> Group:
    """A round that runs: each rank now, and the latest moments."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("rank", "process", "state", "step", "decision"):
        table.add_column(column, justify="right" if column in ("rank", "step", "decision") else "left")
    for member in sorted(supervisor.crew.members, key=lambda member: member.rank):
        if member.gone:
            state = Text("ended", "red")
        elif member.stopped:
            state = Text("stopped", "red")
        elif member.evicted:
            state = Text("evicted", "magenta")
        else:
            state = Text("waits for orders" if member.idle else "in steps", "dim" if member.idle else "green")
        table.add_row(str(member.rank), str(member.process.pid or ""), state, str(member.step), str(member.epoch))
    return Group(Text(supervisor.report.plan, "bold"), table, Text(), timeline(supervisor.report, last=14))


def totals(rounds: Sequence[dict[str, Any]]) -> Group:
    """Many rounds."""
    counts = Table(box=None, padding=(0, 2), header_style="dim")
    found = Totals.of(rounds)
    words = {
        "rounds": found.rounds, "rows compared": found.rows, "wrong rows": found.wrong,
        "disagreements": found.disagreements, "hangs": found.hangs, "leaks": found.leaked, "errors": found.errors,
        "no quorum": found.no_quorum, "healthy ranks evicted": found.evicted_healthy,
    }  # fmt: skip
    for word in words:
        counts.add_column(word, justify="right")
    counts.add_row(*(f"{count:,}" for count in words.values()))
    times = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("fault", "from the first fault to", "rounds", "median", "95%", "longest"):
        times.add_column(column, justify="left" if column.startswith("f") else "right")
    for name, word in DURATIONS.items():
        for fault, values in by_fault(rounds, name).items():
            at = (quantile(values, 0.5), quantile(values, 0.95), max(values))
            times.add_row(fault, word, str(len(values)), *(f"{1000 * value:.1f} ms" for value in at))
    return Group(counts, Text(), times)
