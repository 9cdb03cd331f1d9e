"""The hardware: cores, memory, GPUs and which of them can reach each other."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from ..launch.pool import usable_cores
from ..substrate.memory import available_bytes


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as its driver calls it.
        total_bytes: memory.
        processors: multiprocessors.
        capability: ``"9.0"``.
        reaches: indices of the GPUs whose memory it can map (over NVLink, or PCIe peer to peer).
    """

    name: str
    total_bytes: int
    processors: int
    capability: str
    reaches: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """This machine, as this process sees it.

    Attributes:
        system, architecture, processor: in words.
        cores, usable_cores: in all, and those that this process may use.
        total_bytes, available_bytes: memory, and what may still be taken (a control group counts); ``None`` if unknown.
        gpus: by index; ``gpu_problem``: why there is none, or why they do not answer.
    """

    system: str
    architecture: str
    processor: str
    cores: int
    usable_cores: int
    total_bytes: int | None
    available_bytes: int | None
    gpus: tuple[Gpu, ...]
    gpu_problem: str


def look() -> Machine:
    """Look at this machine. Nothing is allocated."""
    found, problem = gpus()
    try:
        free: int | None = available_bytes()
    except OSError:  # no /proc: not Linux
        free = None
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        total_bytes=_total_bytes(),
        available_bytes=free,
        gpus=found,
        gpu_problem=problem,
    )


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs, and if there is none why."""
    try:
        if not torch.cuda.is_available():
            return (), "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU"
        count = torch.cuda.device_count()
        return tuple(_gpu(index, count) for index in range(count)), ""
    except (RuntimeError, AssertionError) as error:  # a driver that does not answer
        return (), f"the driver does not answer: {error}"


def _gpu(index: int, count: int) -> Gpu:
    about = torch.cuda.get_device_properties(index)
    others = (other for other in range(count) if other != index)
    return Gpu(
        about.name,
        about.total_memory,
        about.multi_processor_count,
        f"{about.major}.{about.minor}",
        tuple(other for other in others if torch.cuda.can_device_access_peer(index, other)),
    )


def _total_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
