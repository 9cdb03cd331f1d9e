"""``moefleet chaos``: kill, stop and continue ranks of a running Fleet, and check every row that it delivers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EpLayout
from ..errors import config_error

if TYPE_CHECKING:
    from ..chaos import Plan, RoundReport

UNSAFE = 1
EPILOG = """\
[bold]Examples[/]

  moefleet chaos --world 4 --kill 1

  moefleet chaos --kill 1,2 --recovery shrink --watch

  moefleet chaos --stop 0 --json

  moefleet chaos --random 7 --rounds 60 --state rounds.jsonl --markdown -
"""


def chaos(
    world: Annotated[int, typer.Option(min=2, help="Ranks, each a process on this machine.")] = 4,
    kill: Annotated[str, typer.Option(help="Ranks that get SIGKILL, separated by commas.", metavar="R,R")] = "",
    stop: Annotated[
        str, typer.Option(help="A rank that gets SIGSTOP, for a time or until readmission.", metavar="R[:SECONDS]")
    ] = "",
    term: Annotated[str, typer.Option(help="Ranks that get SIGTERM, separated by commas.", metavar="R,R")] = "",
    at_step: Annotated[int, typer.Option(min=1, help="The step after which it happens.")] = 20,
    recovery: Annotated[
        str, typer.Option(help="What follows the end of a process: replace, shrink or none.")
    ] = "replace",
    layout: Annotated[EpLayout, typer.Option(help="How received rows lie in memory.")] = EpLayout.EXPERT_MAJOR,
    transport: Annotated[str, typer.Option(help="Transport between the ranks, by name.")] = "shm",
    timeout_ms: Annotated[int, typer.Option(min=10, help="Silence after which a rank is accused.")] = 1000,
    watch: Annotated[bool, typer.Option("--watch", help="Show the ranks while it happens.")] = False,
    seed: Annotated[
        int | None, typer.Option("--random", help="Run random rounds that follow from this seed.", metavar="SEED")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many random rounds.")] = 20,
    state: Annotated[
        Path | None, typer.Option(help="File that keeps random rounds; the next run goes on from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    markdown_file: Annotated[
        str, typer.Option("--markdown", help="Write random rounds' tables here; - is stdout.", metavar="FILE")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline of one round to this file.")] = None,
) -> None:
    """Break a running Fleet, and check what it delivers.

    Ranks run steps whose right answer is known. Then something happens to
    some of them. The others notice, agree on who is missing, go on without,
    and get back to full strength: a process that ended is replaced by a new
    one, one that was stopped is readmitted. Every delivered row is compared
    with the reference under the mask in force. Without a rank named, the
    middle one is killed. The exit status is 1 if a wrong row was delivered,
    ranks disagreed, something hung or something leaked.
    """
    from rich.console import Console

    from ..chaos.plot import plot as draw
    from ..chaos.plot import require_plot

    console = Console(highlight=False)
    if plot is not None:
        require_plot(plot)
    if seed is not None:
        if kill or stop or term or plot is not None or watch:
            raise config_error("--random", seed, "no --kill, --stop, --term, --watch or --plot beside it")
        clean = _random(console, seed, rounds, world, timeout_ms, transport, state, as_json, markdown_file)
    else:
        plan = _plan(world, kill, stop, term, at_step, recovery, layout, transport, timeout_ms)
        report = _one(console, plan, watch and not as_json)
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            from ..chaos.show import whole

            console.print(whole(report))
        if plot is not None:
            draw(report, plot)
        clean = report.clean
    if not clean:
        raise typer.Exit(UNSAFE)


def _plan(
    world: int, kill: str, stop: str, term: str, at_step: int, recovery: str, layout: EpLayout, transport: str,
    timeout_ms: int,
) -> Plan:  # fmt: skip
    from ..chaos.plan import Fault, Kind, Plan, Recovery, parse_ranks, parse_stop

    faults = [Fault(Kind.KILL, rank) for rank in (parse_ranks(kill) if kill else [])]
    faults += [Fault(Kind.TERM, rank) for rank in (parse_ranks(term) if term else [])]
    faults += [parse_stop(stop)] if stop else []
    if not faults:
        faults = [Fault(Kind.KILL, world // 2)]
    known = [each.value for each in Recovery]
    if recovery not in known:
        raise config_error("--recovery", repr(recovery), ", ".join(known))
    return Plan(world, tuple(faults), at_step, layout, transport, Recovery(recovery), timeout_ms)


def _one(console: Any, plan: Plan, watch: bool) -> RoundReport:
    from ..chaos.crew import warm_nursery
    from ..chaos.supervisor import new_store, run_round

    with closing(warm_nursery()) as nursery:
        store = new_store()
        if not watch:
            return run_round(nursery, store, "round", plan)
        from rich.live import Live

        from ..chaos.show import live

        with Live(console=console, refresh_per_second=20, transient=True) as screen:
            return run_round(nursery, store, "round", plan, lambda supervisor: screen.update(live(supervisor)))


def _random(
    console: Any, seed: int, rounds: int, world: int, timeout_ms: int, transport: str, state: Path | None,
    as_json: bool, markdown_file: str,
) -> bool:  # fmt: skip
    from rich.console import Console
    from rich.progress import Progress

    from ..chaos.report import markdown
    from ..chaos.rounds import run_rounds
    from ..chaos.show import totals

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rounds", total=rounds)

        def done(number: int, report: RoundReport) -> None:
            progress.update(task, completed=number + 1, description=report.plan)
            if not report.clean:
                progress.console.print(f"round {number}: {report.plan}: {report.as_json()}")

        found = run_rounds(seed, rounds, world, timeout_ms, transport, state, done)
    if as_json:
        typer.echo(json.dumps({"seed": seed, "rounds": found}, indent=2))
    elif markdown_file != "-":
        console.print(totals(found))
    if markdown_file == "-":
        typer.echo(markdown(found))
    elif markdown_file:
        Path(markdown_file).write_text(markdown(found))
    return all(each["clean"] for each in found)
