"""The run on GPUs: as one of the ranks that torchrun started, or on ranks that are started here."""

from __future__ import annotations

from ..config import BootstrapConfig
from ..launch import launch
from ..launch.devices import require_device
from ..launch.torchrun import reports, under_torchrun
from .gpu import GpuPlan, GpuRun, measure_here


def measure_on_gpus(plan: GpuPlan, total_s: float = 3600.0) -> tuple[GpuRun, bool]:
    """Run all cases. Also tells whether this process is to report: not on torchrun's ranks other than 0.

    Args:
        plan: what to run.
        total_s: for everything, where the ranks are started here.

    Raises:
        MoEEpArchError, MoEEpConfigError: there is no GPU for each rank.
        MoEEpError: what a rank raised.
    """
    require_device("cuda", plan.cases[0].world)
    if under_torchrun():
        return measure_here(BootstrapConfig.from_env(timeout_s=plan.timeout_s), plan), reports()
    results = launch(measure_here, plan.cases[0].world, args=(plan,), timeout_s=total_s)
    for result in results:
        if result.error is not None:
            raise result.error
    return results[0].value, True
