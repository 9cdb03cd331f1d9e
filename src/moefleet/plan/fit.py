"""Which transports can serve a Fleet of given sizes, and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import FleetParams
from ..errors import MoEEpConfigError
from ..fleet import Capability, check_limits
from ..knobs import FleetAlgoKnob
from .memory import Memory, fleet_memory
from .surroundings import Surroundings
from .words import in_bytes


@dataclass(frozen=True)
class Fit:
    """One transport for one Fleet.

    Attributes:
        transport: its name.
        device_type: ``"cpu"`` or ``"cuda"``, where its tensors would be.
        memory: what the Fleet takes on the rank with most experts; ``None`` if the transport does not say.
        fits: whether its limits and the memory allow it. Memory that is unknown counts as enough.
        here: whether it works on this machine.
        reason: why it does not fit, else why not here; empty if both.
        short_bytes: what is missing; 0 if nothing, or nobody knows.
    """

    transport: str
    device_type: str
    memory: Memory | None
    fits: bool
    here: bool
    reason: str
    short_bytes: int = 0


def fit(
    name: str,
    capability: Capability,
    params: FleetParams,
    world_size: int,
    weights: int,
    around: Surroundings,
    algo_knobs: Sequence[FleetAlgoKnob] = (),
) -> Fit:
    """Hold a Fleet of ``params`` against a transport's limits and the memory that is left.

    Args:
        name, capability: the transport and what its probe said.
        weights: bytes of model weights on the rank that holds most.
        around: memory.
    """
    device = device_type(capability, around)
    refused = ""
    if capability.limits is not None:
        try:
            check_limits(name, capability.limits, params, world_size, torch.device(device), algo_knobs)
        except MoEEpConfigError as error:
            refused = str(error)
    memory = None if refused else fleet_memory(name, params, world_size, device, algo_knobs)
    room, needed = around.for_each(device, world_size), weights + (memory.at_start if memory else 0)
    short = 0 if room is None else max(0, needed - room)
    if not refused and short:
        refused = f"needs {in_bytes(needed)} on each rank, {in_bytes(room or 0)} available"
    return Fit(name, device, memory, not refused, capability.available, refused or capability.reason, short)


def device_type(capability: Capability, around: Surroundings) -> str:
    """Where this transport's tensors would be: on a GPU if it has no other choice, or there is one."""
    types = capability.limits.device_types if capability.limits is not None else frozenset({"cpu"})
    return "cuda" if "cuda" in types and ("cpu" not in types or around.gpu_bytes is not None) else "cpu"
