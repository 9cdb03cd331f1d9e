"""``moefleet bench comm --device cuda``: the same on GPUs, beside other libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .running import WRONG_OUTPUT

if TYPE_CHECKING:
    from ...bench.cases import CommCase


def run_on_gpus(
    cases: Sequence[CommCase],
    candidates: Sequence[str],
    rounds: int,
    timeout_s: float,
    json: str,
    plot: Path | None,
) -> None:
    """Measure and show; under torchrun only rank 0 shows. Exits with 1 where an output was wrong."""
    from rich.console import Console

    from ...bench.gpu import GpuPlan
    from ...bench.gpu_report import gpu_json, gpu_plot, gpu_records, gpu_table
    from ...bench.gpu_run import measure_on_gpus
    from ...bench.plot import require_plot

    if plot is not None:
        require_plot(plot)
    if len({case.world for case in cases}) > 1:
        raise typer.BadParameter("--device cuda takes one --world")
    run, reports = measure_on_gpus(GpuPlan(cases, candidates, rounds=rounds, timeout_s=timeout_s))
    if not reports:
        return
    found = gpu_records(run)
    if json == "-":
        sys.stdout.write(gpu_json(found, run))
    elif json:
        Path(json).write_text(gpu_json(found, run))
    if plot is not None:
        gpu_plot(found, plot)
    console = Console(stderr=json == "-", width=None if sys.stdout.isatty() else 160)
    console.print(gpu_table(found, run))
    for result in run.results:
        for name, reason in result.left_out.items():
            where = f"{result.case.layout.value}, {result.case.tokens} tokens"
            console.print(f"not measured: {name}, {where}: {reason}", style="dim", highlight=False, markup=False)
    if any(not record.valid for record in found):
        raise typer.Exit(WRONG_OUTPUT)
