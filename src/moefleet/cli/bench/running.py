"""A run from its plan to what is shown: progress, files, tables, exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import show_error

if TYPE_CHECKING:
    from ...bench.matrix import Outcome

WRONG_OUTPUT = 1


def run(
    plan: Any,
    measure: Callable[..., Iterator[Any]],
    records: Callable[..., list[Any]],
    json: str,
    resume: bool,
    plot: Path | None,
) -> None:
    """Measure a plan, write and show its records, and exit with 1 where an output was wrong.

    Under torchrun all ranks measure, and the first one reads, writes and shows.

    Args:
        plan, measure, records: as for :func:`moefleet.bench.matrix.run`.
        json, resume, plot: the options.
    """
    from ...bench import matrix
    from ...bench.plot import plot as draw
    from ...bench.plot import require_plot
    from ...bench.records import to_json
    from ...launch.torchrun import reports

    to_file = json not in ("", "-")
    if resume and not to_file:
        raise typer.BadParameter("--resume needs --json FILE: the records are there")
    if plot is not None:
        require_plot(plot)
    notebook, known = matrix.begin(plan, Path(json) if to_file else None, resume=resume)
    left = matrix.remaining(plan, known)
    try:
        with _progress(left.ticks, shown=reports()) as on_tick:
            outcome = matrix.run(plan, notebook, known, measure, records, on_tick)
    except KeyboardInterrupt:
        if to_file:
            typer.echo(
                f"interrupted: {json} has the cases that were measured; --resume goes on with the others", err=True
            )
        raise
    if reports():
        if json == "-":
            sys.stdout.write(to_json(outcome.records))
        if plot is not None:
            draw(outcome.records, plot)
        _show(outcome, to_stderr=json == "-")
    if outcome.complaints:
        raise typer.Exit(WRONG_OUTPUT)


@contextmanager
def _progress(ticks: int, *, shown: bool) -> Iterator[Callable[[Any], None]]:
    """A progress bar on stderr, gone in the end. Yields what to call for each tick with its case."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("starting ranks", total=ticks)
        yield lambda case: progress.update(task, advance=1, description=str(case))


def _show(outcome: Outcome, *, to_stderr: bool) -> None:
    from rich.console import Console

    from ...bench.report import headline, tables

    console = Console(stderr=to_stderr)
    console.print(headline(outcome.records[0]), highlight=False, markup=False)
    for table in tables(outcome.records):
        console.print(table)
    if outcome.reused:
        console.print(f"{outcome.reused} cases were measured before", style="dim", highlight=False)
    for name, reason in sorted(outcome.left_out):
        console.print(f"not measured: {name}: {reason}", style="dim", highlight=False, markup=False)
    for complaint in outcome.complaints:
        show_error(complaint)
