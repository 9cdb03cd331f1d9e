"""Which device a rank computes on: the CPU, or the GPU of its number."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config import BootstrapConfig
from ..errors import MoEEpArchError, config_error


def require_device(device: str, world: int) -> None:
    """Find out before anything starts whether each of ``world`` ranks of this machine can have its device.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        MoEEpArchError: there is no CUDA GPU.
        MoEEpConfigError: more ranks than GPUs.
    """
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise MoEEpArchError("--device cuda: this machine has no CUDA GPU; leave it out for CPU ranks")
    count = torch.cuda.device_count()
    if world > count:
        raise config_error("world", world, f"at most {count}, a GPU for each rank")


def take_device(bootstrap: BootstrapConfig, device: str) -> BootstrapConfig:
    """Take this rank's device for all that follows in this process: the bootstrap that says so.

    Raises:
        as :func:`require_device`.
    """
    require_device(device, bootstrap.world_size)
    if device == "cpu":
        return replace(bootstrap, device="cpu")
    torch.cuda.set_device(bootstrap.rank)
    return replace(bootstrap, device=torch.device("cuda", bootstrap.rank))
