"""The fault calls of a Fleet whose transport keeps a :class:`FaultState`: what users see of accusations and masks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..errors import MoEEpFaultToleranceUnsupportedError, MoEEpRankEvictedError, config_error
from ..knobs import FleetAlgoKnob, FleetAlgoKnobFaultTolerance
from ..substrate.faults import FaultState
from .base import Fleet, FleetSpec


def tolerance_of(spec: FleetSpec) -> FleetAlgoKnobFaultTolerance | None:
    """The fault-tolerance knob, if it was given and is enabled."""
    for knob in spec.knobs:
        if isinstance(knob, FleetAlgoKnobFaultTolerance) and knob.enabled:
            return knob
    return None


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class FaultTolerantFleet(Fleet):
    """A Fleet that can go on without some of its ranks, where the knob asks for it.

    Subclasses keep ``faults`` and fill in the three hooks.

    Attributes:
        tolerance: the knob in force, or ``None``.
        faults: accusations and mask of this rank.
    """

    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = frozenset({FleetAlgoKnobFaultTolerance})

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        self.tolerance = tolerance_of(spec)
        self.faults = FaultState(self.bootstrap.rank, self.bootstrap.world_size, self.tolerance is not None)

    @abstractmethod
    def _look_for_deaths(self) -> None:
        """Accuse ranks that are known to be gone, without waiting."""

    @abstractmethod
    def _mask_changed(self) -> None:
        """Bring what steps read in line with ``faults.mask``."""

    @property
    def supports_fault_tolerance(self) -> bool:
        return self.tolerance is not None

    @property
    def renormalize(self) -> bool:
        """Whether rows that lost experts are rescaled."""
        return self.tolerance is not None and self.tolerance.renormalize

    @property
    def active_mask_epoch(self) -> int:
        return self.faults.epoch

    def require_member(self) -> None:
        """Raise MoEEpRankEvictedError where the others go on without this rank."""
        if self.faults.evicted:
            raise MoEEpRankEvictedError(
                f"rank {self.bootstrap.rank} was masked by decision {self.faults.epoch} "
                f"(mask {self.faults.active()}); drop its handles and call clear_faults(readmit=True) together with "
                "the survivors, or end the process"
            )

    def query_fault(self) -> bool:
        self._guard("query_fault", "a captured answer would stay what it was at capture")
        self._look_for_deaths()
        return self.faults.fault

    def query_active_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        self._guard("query_active_mask", "the mask would be frozen into the graph")
        mask = torch.tensor(self.faults.active(), dtype=torch.int32, device=self.bootstrap.device)
        return mask if out is None else out.copy_(mask)

    def set_active_mask(self, mask: torch.Tensor | Sequence[int]) -> None:
        self._guard("set_active_mask", "it changes host state, which a replay does not repeat")
        self.require_member()
        bits = [int(bit) for bit in (mask.tolist() if isinstance(mask, torch.Tensor) else mask)]
        rank, world = self.bootstrap.rank, self.bootstrap.world_size
        if len(bits) != world:
            raise config_error("set_active_mask", f"{len(bits)} entries", f"{world}, one for each rank")
        if any(bit not in (0, 1) for bit in bits):
            raise config_error("set_active_mask", bits, "0 (masked) and 1 (active) only")
        if not bits[rank]:
            raise config_error(
                "set_active_mask", f"{bits} on rank {rank}", "1 for oneself", "a rank never masks itself"
            )
        self.faults.adopt(self.faults.epoch, bits)
        self._mask_changed()

    def _guard(self, call: str, why_not_captured: str) -> None:
        if self.tolerance is None:
            raise self._no_fault_tolerance(call)
        if capturing():
            raise MoEEpFaultToleranceUnsupportedError(
                f"{call} under CUDA-graph capture: {why_not_captured}; call it between replays"
            )
