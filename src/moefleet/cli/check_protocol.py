"""``moefleet check-protocol``: how ranks agree after a fault, checked in every order of events there is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ..fleet.agreement.checker import Mutant, Result

BROKEN = 1
EPILOG = """\
[bold]Examples[/]

  moefleet check-protocol

  moefleet check-protocol --scope full --mutants --markdown protocol.md
"""
COLUMNS = ("scope", "states", "transitions", "seconds", "most operations", "result")
MUTANT_COLUMNS = ("mistake", "moves", "result")
TEXT_COLUMNS = ("scope", "mistake", "result")


class ScopeName(str, Enum):
    """How much is searched."""

    QUICK = "quick"
    FULL = "full"


def check_protocol(
    scope: Annotated[ScopeName, typer.Option(help="quick takes seconds, full minutes.")] = ScopeName.QUICK,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Also check that mistakes built into the protocol are found.")
    ] = False,
    json_file: Annotated[
        str, typer.Option("--json", help="Write the results to this file; - is stdout.", metavar="FILE")
    ] = "",
    markdown_file: Annotated[
        str, typer.Option("--markdown", help="Write the table to this file; - is stdout.", metavar="FILE")
    ] = "",
) -> None:
    """Check how ranks agree on one mask, in every order of events.

    The function that the ranks of a Fleet run after a fault is run here for
    all of them at once, through every interleaving, with a crash before each
    write and with each wait running out of time. Shown are the states and
    transitions searched and whether the properties hold in all of them. The
    exit status is 1 if one does not, or if a mutant is not caught.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ..fleet.agreement.checker import FULL, MUTANTS, PROPERTIES, QUICK, check

    console = Console(stderr="-" in (json_file, markdown_file), highlight=False)
    scopes = QUICK if scope is ScopeName.QUICK else FULL
    results: list[Result] = []
    caught: list[tuple[Mutant, Result]] = []
    text = TextColumn("{task.description}")
    with Progress(SpinnerColumn(), text, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def tick(name: str) -> Callable[[int], None]:
            progress.update(task, description=name)
            return lambda states: progress.update(task, description=f"{name}: {states:,} states")

        for each in scopes:
            results.append(check(each, tick(each.name)))
        for mutant in MUTANTS if mutants else ():
            caught.append((mutant, mutant.search(tick(mutant.name))))
    rows = [_scope_row(result) for result in results]
    mutant_rows = [_mutant_row(mutant, result) for mutant, result in caught]
    console.print(_table("Agreement of ranks", COLUMNS, rows))
    if mutants:
        console.print(_table("Mistakes that have to be found", MUTANT_COLUMNS, mutant_rows))
    for result in results:
        if result.violation is not None:
            words = (f"{result.scope}: {result.violation}", f"starting with: {result.start}", *result.violation.trace)
            console.print("\n  ".join(words), markup=False, style="red")
    if json_file:
        found = [{"mutant": mutant.name, "breaks": mutant.breaks, **_as_json(result)} for mutant, result in caught]
        report = {"scope": scope.value, "properties": PROPERTIES, "results": [_as_json(r) for r in results]}
        _write(json_file, json.dumps({**report, "mutants": found}, indent=2) + "\n")
    if markdown_file:
        lines = _markdown(COLUMNS, rows) + (["", *_markdown(MUTANT_COLUMNS, mutant_rows)] if mutants else [])
        _write(markdown_file, "\n".join(lines) + "\n")
    if not all(result.holds for result in results) or not all(mutant.is_caught_by(result) for mutant, result in caught):
        raise typer.Exit(BROKEN)


def _scope_row(result: Result) -> tuple[str, ...]:
    counts, most = result.counts, result.most_operations
    numbers = (
        f"{counts.states:,}",
        f"{counts.transitions:,}",
        f"{counts.seconds:.1f}",
        "" if most is None else str(most),
    )
    return (result.scope, *numbers, "holds" if result.violation is None else f"BROKEN {result.violation}")


def _mutant_row(mutant: Mutant, result: Result) -> tuple[str, ...]:
    broken = result.violation
    words = f"caught {broken}" if mutant.is_caught_by(result) else f"NOT CAUGHT: {broken or 'everything holds'}"
    return mutant.name, str(len(broken.trace) if broken else ""), words


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for row in rows:
        bad = row[-1].startswith(("BROKEN", "NOT CAUGHT"))
        table.add_row(*row[:-1], Text(row[-1], style="bold red" if bad else "green"))
    return table


def _markdown(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    rule = ["---" if column in TEXT_COLUMNS else "---:" for column in columns]
    return ["| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows)]


def _as_json(result: Result) -> dict[str, Any]:
    broken = result.violation
    return {
        "scope": result.scope,
        "states": result.counts.states,
        "transitions": result.counts.transitions,
        "seconds": result.counts.seconds,
        "most_operations": result.most_operations,
        "holds": result.holds,
        "broken": broken and {"property": broken.prop, "message": broken.message, "trace": list(broken.trace)},
        "start": result.start if broken else "",
    }


def _write(target: str, text: str) -> None:
    if target == "-":
        typer.echo(text, nl=False)
        return
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)
