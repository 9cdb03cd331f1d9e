"""Who this process is among the ranks of its job, and the device that it computes on."""

from __future__ import annotations

import os

import torch

import moefleet as m


def bootstrap_of_job(device: str = "cpu") -> m.BootstrapConfig:
    """This rank, as torchrun or srun says it. Ranks meet at MASTER_ADDR and MASTER_PORT.

    Args:
        device: "cpu", or "cuda" for the GPU with this process's number on its host.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:  # srun without torchrun
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    rank, world_size, local = (int(os.environ.get(name, default)) for name, default in zip(names, "010"))
    if device == "cuda":
        device = f"cuda:{local % torch.cuda.device_count()}"  # a task that sees one GPU alone calls it 0
        torch.cuda.set_device(device)
    return m.BootstrapConfig(world_size, rank, device=device)
