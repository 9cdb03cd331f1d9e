"""Which device a rank computes on: the CPU, or the GPU of its number on this machine."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from ..config import BootstrapConfig
from ..errors import MoEEpArchError, config_error
from .torchrun import under_torchrun


def require_device(device: str, world: int) -> None:
    """Find out before anything starts whether each rank of this machine can have its device.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        world: all ranks; those of this machine are as many, or under torchrun at most ``LOCAL_WORLD_SIZE``.

    Raises:
        MoEEpArchError: there is no CUDA GPU.
        MoEEpConfigError: more ranks than GPUs.
    """
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise MoEEpArchError("--device cuda: this machine has no CUDA GPU; leave it out for CPU ranks")
    count = torch.cuda.device_count()
    here = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world))) if under_torchrun() else world
    if here > count:
        raise config_error("world", here, f"at most {count}, a GPU for each rank of this machine")


def take_device(bootstrap: BootstrapConfig, device: str) -> BootstrapConfig:
    """Take this rank's device for all that follows in this process: the bootstrap that says so.

    The GPU is that of the rank's number, or under torchrun of its ``LOCAL_RANK``.

    Raises:
        as :func:`require_device`.
    """
    require_device(device, bootstrap.world_size)
    if device == "cpu":
        return replace(bootstrap, device="cpu")
    number = bootstrap.rank
    if under_torchrun() and os.environ["RANK"].strip() == str(number):  # not a rank that one of torchrun's started
        number = int(os.environ.get("LOCAL_RANK", number))
    torch.cuda.set_device(number)
    return replace(bootstrap, device=torch.device("cuda", number))
