"""A diagnosis on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..native import Status
from ..plan.words import in_bytes
from .backends import Backend
from .diagnosis import Diagnosis, limits_in_words
from .fleets import EXPERTS, HIDDEN, TOPK, WORLD, FleetSize
from .machine import Machine
from .versions import Package

YES, NO = Text("yes", "green"), Text("no", "red")


def show(console: Console, found: Diagnosis, limits: bool = False) -> None:
    """Print machine, packages, transports and kernels, and the verdict."""
    console.print(machine_table(found.machine, found.helper))
    console.print(packages_table(found.packages))
    console.print(backends_table("Transports", found.transports))
    if limits:
        console.print(limits_table(found.transports))
    console.print(backends_table("Kernels", found.kernels))
    console.print(fleets_table(found.fleets))
    console.print(verdict(found))


def machine_table(machine: Machine, helper: Status) -> Table:
    """Hardware, and whether CPU ranks use compiled code; a line for each thing."""
    table = _table("Machine", header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("system", Text(f"{machine.system}, {machine.architecture}"))
    cores = f"{machine.usable_cores} usable of {machine.cores}"
    table.add_row("cores", Text(f"{cores}, {machine.processor}" if machine.processor else cores))
    free, total = (
        "unknown" if n is None else in_bytes(n) for n in (machine.available_bytes, machine.total_bytes)
    )  # fmt: skip
    table.add_row("memory", f"{free} available of {total}")
    for index, gpu in enumerate(machine.gpus):
        reach = ", ".join(map(str, gpu.reaches)) or "none"
        about = f"{gpu.name}, {in_bytes(gpu.total_bytes)}, {gpu.processors} multiprocessors, compute {gpu.capability}"
        others = "" if len(machine.gpus) == 1 else f"; reaches the memory of: {reach}"
        table.add_row(f"GPU {index}", Text(about + others))
    if not machine.gpus:
        table.add_row("GPUs", Text(f"none: {machine.gpu_problem}"))
    about = f"compiled: {helper.path}" if helper.available else f"none, CPU ranks use numpy: {helper.reason}"
    table.add_row("helper", Text(about))
    return table


def packages_table(packages: tuple[Package, ...]) -> Table:
    """Versions, and for what is missing what it is for."""
    table = _table("Packages", header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for each in packages:
        about = Text(each.needed_for, "dim")
        if each.install:
            about = Text.assemble((f"for {each.needed_for}: ", "dim"), (each.install, "cyan"))
        table.add_row(each.name, Text(each.version or "not installed", "" if each.version else "yellow"), about)
    return table


def backends_table(title: str, backends: tuple[Backend, ...]) -> Table:
    """A line for each, with what works or why not, and below it what would help."""
    table = _table(title)
    table.add_column("name", no_wrap=True)
    table.add_column("works")
    table.add_column("about", overflow="fold")
    for each in backends:
        about = Text(each.reason or ", ".join(each.features).replace("_", " "))
        if each.install:
            about.append("\n").append(each.install, "cyan")
        if each.offered_by:
            about = Text.assemble((f"[{each.offered_by}] ", "dim"), about)
        table.add_row(Text(each.name), YES if each.available else NO, about)
    return table


def limits_table(backends: tuple[Backend, ...]) -> Table:
    """A line for each bound, a column for each transport that says its own."""
    known = [each for each in backends if each.limits is not None]
    table = _table("Limits")
    table.add_column("")
    for each in known:
        table.add_column(Text(each.name), overflow="fold")
    bounds = [limits_in_words(each.limits) for each in known if each.limits is not None]
    for name in bounds[0] if bounds else ():
        table.add_row(name.replace("_", " "), *(Text(_words(of[name])) for of in bounds))
    return table


def fleets_table(fleets: tuple[FleetSize, ...]) -> Table:
    """A line for each size, a column for each transport."""
    table = _table(f"Most memory of a rank: W {WORLD}, E {EXPERTS}, K {TOPK}, H {HIDDEN}, bfloat16")
    table.add_column("layout", no_wrap=True)
    table.add_column("M", justify="right")
    names = sorted({name for each in fleets for name in each.at_most})
    for name in names:
        table.add_column(name, justify="right")
    for each in fleets:
        sizes = (in_bytes(each.at_most[name]) if name in each.at_most else "" for name in names)
        table.add_row(each.layout, str(each.max_tokens_per_rank), *sizes)
    return table


def verdict(found: Diagnosis) -> Text:
    """What "auto" would take here."""
    if found.auto is None:
        return Text("\nNo transport works here.", "bold red")
    names = [each.name for each in found.transports if each.available]
    return Text(f'\n{", ".join(names)} work{"s" * (len(names) == 1)} here; "auto" prefers {found.auto}.', "green")


def _words(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(title: str, header: bool = True) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if header else None,
        show_header=header,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
