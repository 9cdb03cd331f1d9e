"""``moefleet bench``: measurements on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.cases import CombineInput, Routing
from ..config import EpLayout
from .errors import show_error

if TYPE_CHECKING:
    from ..bench.comm import CaseResult, CommPlan
    from ..bench.report import Record

WRONG_OUTPUT = 1
SIZES, RUN, OUTPUT = "What is measured", "How", "Output"

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine."""


class Dtype(str, Enum):
    """Types of a row's elements, by torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def parse_tokens(texts: Sequence[str]) -> list[int]:
    """``["1,128", "64"]`` as ``[1, 128, 64]``."""
    words = split_commas(texts)
    if not words or not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"{', '.join(texts)!r} is not a list of numbers of tokens such as 1,128")
    return [int(word) for word in dict.fromkeys(words)]


def split_commas(texts: Sequence[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


@bench.command(
    epilog="[bold]Examples[/]\n\n"
    "  moefleet bench comm --world 4 --tokens 1,128 --hidden 2048 --experts 64 --topk 8\n\n"
    "  moefleet bench comm --layout flat --transport shm,gloo-raw --routing zipf --validate\n\n"
    "  moefleet bench comm --tokens 1,16,128 --json comm.json --plot comm.png"
)
def comm(
    world: Annotated[int, typer.Option(help="Ranks.", min=1, rich_help_panel=SIZES)] = 4,
    tokens: Annotated[
        list[str], typer.Option(help="Tokens of each rank; repeat it or separate by commas.", rich_help_panel=SIZES)
    ] = ["128"],  # noqa: B006 - typer reads it and never writes it
    hidden: Annotated[int, typer.Option(help="Elements of a row.", min=1, rich_help_panel=SIZES)] = 2048,
    experts: Annotated[int, typer.Option(help="Experts of all ranks.", min=1, rich_help_panel=SIZES)] = 64,
    topk: Annotated[int, typer.Option(help="Experts of a token.", min=1, rich_help_panel=SIZES)] = 8,
    dtype: Annotated[Dtype, typer.Option(help="Type of a row's elements.", rich_help_panel=SIZES)] = Dtype.FLOAT32,
    routing: Annotated[
        Routing, typer.Option(help="How tokens choose experts.", rich_help_panel=SIZES)
    ] = Routing.UNIFORM,
    layout: Annotated[
        list[EpLayout], typer.Option(help="Only this layout; may be repeated.", rich_help_panel=SIZES)
    ] = [],  # noqa: B006
    transport: Annotated[
        list[str],
        typer.Option(help="Only these, gloo-raw among them; the first is compared with.", rich_help_panel=SIZES),
    ] = [],  # noqa: B006
    combine_input: Annotated[
        CombineInput,
        typer.Option(
            help="Where experts leave their rows: the transport's own buffer, where it has one, or a tensor.",
            rich_help_panel=SIZES,
        ),
    ] = CombineInput.BUFFER,
    steps: Annotated[
        int, typer.Option(help="Timed steps of a transport in each round.", min=1, rich_help_panel=RUN)
    ] = 10,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.", min=0, rich_help_panel=RUN)] = 2,
    rounds: Annotated[int, typer.Option(help="How often transports take turns.", min=1, rich_help_panel=RUN)] = 10,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each rank.", min=1, show_default="cores / ranks", rich_help_panel=RUN)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one round may take.", rich_help_panel=RUN)] = 120.0,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Compare outputs with the reference; exit 1 if wrong.", rich_help_panel=RUN),
    ] = False,
    json: Annotated[
        str, typer.Option(help="Write records to this file; - is stdout.", metavar="FILE", rich_help_panel=OUTPUT)
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture (needs matplotlib).", metavar="FILE", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Time dispatch and combine of every transport that runs here, beside two raw gloo all-to-alls of the same rows.

    A step updates the routing, dispatches, and combines rows that lie ready; its time is that of the slowest rank.

    All transports take turns in one run, so that noise hits them alike.
    """
    import torch

    from ..bench.cases import CommCase
    from ..bench.comm import CommPlan
    from ..bench.plot import plot as draw
    from ..bench.plot import require_plot
    from ..bench.report import to_json

    if json and not Path(json).absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json}: no such folder")
    if plot is not None:
        require_plot(plot)
    cases = [
        CommCase(
            world=world,
            tokens=count,
            hidden=hidden,
            experts=experts,
            topk=topk,
            layout=each,
            dtype=getattr(torch, dtype.value),
            routing=routing,
            combine_input=combine_input,
        )
        for each in dict.fromkeys(layout or EpLayout)
        for count in parse_tokens(tokens)
    ]
    plan = CommPlan(
        cases, split_commas(transport), steps, warmup, rounds, validate=validate, threads=threads, timeout_s=timeout
    )
    results, found = _measure(plan)
    if json == "-":
        sys.stdout.write(to_json(found))
    elif json:
        Path(json).write_text(to_json(found))
    if plot is not None:
        draw(found, plot)
    _show(results, found, to_stderr=json == "-")
    if any(result.wrong for result in results):
        raise typer.Exit(WRONG_OUTPUT)


def _measure(plan: CommPlan) -> tuple[list[CaseResult], list[Record]]:
    """Run the plan behind a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ..bench.comm import CommCase, measure
    from ..bench.report import records

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results, found = [], []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting ranks", total=plan.ticks)

        def on_tick(case: CommCase) -> None:
            progress.update(task, advance=1, description=f"{case.layout.value}, {case.tokens} tokens")

        for result in measure(plan, on_tick):
            results.append(result)
            found += records(plan, result)
    return results, found


def _show(results: Sequence[CaseResult], found: Sequence[Record], *, to_stderr: bool) -> None:
    from rich.console import Console

    from ..bench.report import headline, tables

    console = Console(stderr=to_stderr)
    console.print(headline(found[0]), highlight=False)
    for table in tables(found):
        console.print(table)
    left_out = {(name, reason) for result in results for name, reason in result.left_out.items()}
    for name, reason in sorted(left_out):
        console.print(f"not measured: {name}: {reason}", style="dim", highlight=False, markup=False)
    for result in results:
        for name, error in result.wrong.items():
            show_error(
                f"{name}, {result.case.layout.value}, {result.case.tokens} tokens: output is off by "
                f"{error:.3g} times what rounding allows"
            )
