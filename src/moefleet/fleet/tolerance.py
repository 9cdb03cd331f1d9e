"""The fault calls of a Fleet whose transport keeps a :class:`FaultState`: what users see of accusations and masks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from ..config import BootstrapConfig
from ..errors import MoEEpFaultToleranceUnsupportedError, MoEEpRankEvictedError, config_error
from ..knobs import FleetAlgoKnob, FleetAlgoKnobFaultTolerance, FleetAlgoKnobTopologyCapacity
from ..placement import Placement
from ..substrate.faults import FaultState
from .base import Fleet, FleetSpec
from .create import agree
from .rendezvous import Meeting


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

    Subclasses fill in the hooks.

    Attributes:
        spec: what the Fleet was built from; its meeting is the one at which the present ranks met.
        tolerance: the knob in force, or ``None``.
        capacity: most ranks that it may grow to.
        faults: accusations and mask of this rank; the subclass keeps it.
    """

    faults: FaultState
    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = frozenset(
        {FleetAlgoKnobFaultTolerance, FleetAlgoKnobTopologyCapacity}
    )

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.tolerance = tolerance_of(spec)
        self.capacity = spec.bootstrap.world_size
        for knob in spec.knobs:
            if isinstance(knob, FleetAlgoKnobTopologyCapacity):
                self.capacity = knob.n

    @abstractmethod
    def _retopologise(self, meeting: Meeting, placement: Placement) -> None:
        """Build what belongs to the meeting's ranks, go over to it, and let go of what there was."""

    @abstractmethod
    def _open_steps(self) -> int:
        """Steps dispatched and not yet combined."""

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

    def update_topology(
        self,
        bootstrap: BootstrapConfig,
        algo_knobs: Sequence[FleetAlgoKnob] = (),
        *,
        placement: Placement | None = None,
    ) -> None:
        """Go on with the ranks of ``bootstrap``: some removed, replaced by new processes, or added. For all of them.

        Ranks that stay call this; a new process calls create_fleet with the parameters and knobs that the Fleet was
        built with. Memory, sockets, masks, epochs and counters begin anew. Where it fails, the Fleet goes on as it was.

        Args:
            bootstrap: the new world size, and this rank in it.
            algo_knobs: none: knobs stay what they were.
            placement: where experts are from now on; ``None`` for contiguous blocks.

        Raises:
            MoEEpConfigError: more ranks than the capacity, an open step, or a rank that is taken.
            MoEEpTimeoutError: a rank did not come within ``bootstrap.timeout_s``.
        """
        self._guard("update_topology", "it makes new memory, which a captured graph does not know")
        self.require_member()
        self._require_idle("update_topology")
        if algo_knobs:
            raise config_error("update_topology: algo_knobs", list(algo_knobs), "none", "knobs belong to create_fleet")
        if bootstrap.world_size > self.capacity:
            raise config_error(
                "update_topology: bootstrap.world_size",
                bootstrap.world_size,
                f"at most the capacity, {self.capacity}",
                "give FleetAlgoKnobTopologyCapacity(n) at construction",
            )
        if placement is not None and placement.world_size != bootstrap.world_size:
            raise config_error("update_topology: placement", f"{placement.world_size} ranks", f"{bootstrap.world_size}")
        where = placement or Placement.contiguous(self.params.num_experts, bootstrap.world_size)
        meeting = Meeting.next_generation(self.spec.meeting, bootstrap)
        spec, _ = agree(replace(self.spec, bootstrap=bootstrap, meeting=meeting, placement=where, backend=self.name))
        self._retopologise(meeting, where)
        self.spec = spec

    def _require_idle(self, call: str) -> None:
        if count := self._open_steps():
            raise config_error(call, f"{count} open steps", "none", "combine or destroy the handles first")

    def _guard(self, call: str, why_not_captured: str) -> None:
        if self.tolerance is None:
            raise self._no_fault_tolerance(call)
        if capturing():
            raise MoEEpFaultToleranceUnsupportedError(
                f"{call} under CUDA-graph capture: {why_not_captured}; call it between replays"
            )
