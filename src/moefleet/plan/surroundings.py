"""What this machine offers to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..fleet import Capability, available_backends, probe
from ..substrate.memory import available_bytes


@dataclass(frozen=True)
class Surroundings:
    """Transports and memory.

    Attributes:
        transports: what each one's probe says, in "auto"'s order.
        host_bytes: memory of this host that all ranks on it may still take together; ``None`` if unknown.
        gpu_bytes: free memory of the fullest GPU; ``None`` without one.
        rank_bytes: memory of each rank, given by the user, which replaces both.
    """

    transports: Mapping[str, Capability]
    host_bytes: int | None = None
    gpu_bytes: int | None = None
    rank_bytes: int | None = None

    def for_each(self, device_type: str, world_size: int) -> int | None:
        """Bytes that a rank with tensors on this type of device may take; ``None`` if unknown."""
        if self.rank_bytes is not None:
            return self.rank_bytes
        if device_type == "cuda":
            return self.gpu_bytes
        return None if self.host_bytes is None else self.host_bytes // world_size


def look(rank_bytes: int | None = None) -> Surroundings:
    """Probe the transports and read what memory is free. Nothing is allocated."""
    transports = {}
    for name in available_backends():
        try:
            transports[name] = probe(name)
        except Exception as error:  # other people's code
            transports[name] = Capability(False, f"its probe failed: {error!r}")
    try:
        host: int | None = available_bytes()
    except OSError:  # no /proc: not Linux
        host = None
    return Surroundings(transports, host, _gpu_bytes(), rank_bytes)


def _gpu_bytes() -> int | None:
    try:
        return min((torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())), default=None)
    except (RuntimeError, AssertionError):  # a driver that does not answer
        return None
