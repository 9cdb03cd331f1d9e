"""The run on GPUs: as one of the ranks that torchrun started, or on ranks that are started here."""

from __future__ import annotations

import os

import torch

from ..config import BootstrapConfig
from ..errors import MoEEpArchError
from ..launch import launch
from .gpu import GpuPlan, GpuRun, measure_here


def measure_on_gpus(plan: GpuPlan, total_s: float = 3600.0) -> tuple[GpuRun, bool]:
    """Run all cases. Also tells whether this process is to report: not on torchrun's ranks other than 0.

    Args:
        plan: what to run.
        total_s: for everything, where the ranks are started here.

    Raises:
        MoEEpArchError: there is no CUDA GPU.
        MoEEpError: what a rank raised.
    """
    if not torch.cuda.is_available():
        raise MoEEpArchError("--device cuda: this machine has no CUDA GPU; leave it out to measure CPU ranks")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        bootstrap = BootstrapConfig.from_env(timeout_s=plan.timeout_s)
        return measure_here(bootstrap, plan), bootstrap.rank == 0
    results = launch(measure_here, plan.cases[0].world, args=(plan,), timeout_s=total_s)
    for result in results:
        if result.error is not None:
            raise result.error
    return results[0].value, True
