"""The fault calls of a Fleet whose transport keeps a :class:`FaultState`: what users see of accusations and masks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch.distributed import PrefixStore

from ..config import BootstrapConfig
from ..errors import MoEEpFaultToleranceUnsupportedError, MoEEpRankEvictedError, config_error
from ..knobs import FleetAlgoKnob, FleetAlgoKnobFaultTolerance, FleetAlgoKnobTopologyCapacity
from ..placement import Placement
from ..substrate.faults import FaultState
from .agreement import Agreement, Decision
from .agreement.values import mask_list, members
from .base import Fleet, FleetSpec
from .create import agree
from .rendezvous import Meeting


def tolerance_of(spec: FleetSpec) -> FleetAlgoKnobFaultTolerance | None:
    """The fault-tolerance knob, if it was given and is enabled."""
    for knob in spec.knobs:
        if isinstance(knob, FleetAlgoKnobFaultTolerance) and knob.enabled:
            return knob
    return None


DEFAULT_SILENCE_MS = 2000
"""How long a peer may be silent where the knob says ``timeout_ms=0``."""


def silence_s(tolerance: FleetAlgoKnobFaultTolerance | None, timeout_s: float) -> float:
    """How long to wait for a peer: the knob's time, or without the knob ``BootstrapConfig.timeout_s``."""
    return timeout_s if tolerance is None else (tolerance.timeout_ms or DEFAULT_SILENCE_MS) / 1000


def agreement_at(
    meeting: Meeting,
    tolerance: FleetAlgoKnobFaultTolerance,
    dead: Callable[[], Iterable[int]],
    in_round: Callable[[int], None],
) -> Agreement:
    """This rank's part in the agreement of a meeting's ranks.

    Args:
        dead, in_round: as for :class:`Agreement`.
    """
    store = PrefixStore("agreement", meeting.store)
    return Agreement(
        store,
        meeting.rank,
        meeting.world_size,
        tolerance,
        incarnation=meeting.incarnation,
        dead=dead,
        in_round=in_round,
    )


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class FaultTolerantFleet(Fleet):
    """A Fleet that can go on without some of its ranks, where the knob asks for it.

    Subclasses fill in the hooks.

    Attributes:
        spec: what the Fleet was built from; its meeting is the one at which the present ranks met.
        tolerance: the knob in force, or ``None``.
        capacity: most ranks that it may grow to.
        faults: accusations and mask of this rank; the subclass keeps it.
        agreement: this rank's part in the agreement of the present ranks, ``None`` without fault tolerance; the
            subclass keeps it.
    """

    faults: FaultState
    agreement: Agreement | None
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
        if self.capacity < spec.bootstrap.world_size:
            raise config_error(
                "FleetAlgoKnobTopologyCapacity.n", self.capacity, f"at least world_size = {spec.bootstrap.world_size}"
            )
        self._eviction = ""

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
        """Bring what steps read in line with ``faults``."""

    @abstractmethod
    def _last_step(self) -> int:
        """The last step begun."""

    @abstractmethod
    def _resume(self, step: int) -> None:
        """Let ``step`` be the next one, on clean buffers."""

    @abstractmethod
    def _leave_round(self) -> None:
        """Tell the peers that this rank is back from a round, having adopted ``faults.epoch``."""

    def _settle(self) -> None:
        """Wait until steps that were begun have run, where they run by themselves."""

    @abstractmethod
    def _require_built(self) -> None:
        """Raise MoEEpError once the Fleet was destroyed."""

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

    def require_alive(self) -> None:
        """Raise where no step can run: MoEEpError once destroyed, MoEEpRankEvictedError while evicted."""
        self._require_built()
        self.require_member()

    def require_member(self) -> None:
        """Raise MoEEpRankEvictedError where the others go on without this rank."""
        if self.faults.evicted:
            raise MoEEpRankEvictedError(self._eviction)

    def query_fault(self) -> bool:
        self._guard("query_fault", "a captured answer would stay what it was at capture")
        self.require_member()
        self._look_for_deaths()
        return self.faults.fault

    def query_active_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        self._guard("query_active_mask", "the mask would be frozen into the graph")
        self.require_member()
        return self._mask() if out is None else out.copy_(self._mask())

    def set_active_mask(self, mask: torch.Tensor | Sequence[int]) -> None:
        """See :meth:`moefleet.Fleet.set_active_mask`. The next decision takes ranks masked here for accused; it does
        not bring those back that an earlier decision masked: that takes ``clear_faults(readmit=True)``."""
        self._guard("set_active_mask", "it changes host state, which a replay does not repeat")
        self.require_member()
        self._require_idle("set_active_mask")
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

    def reconcile_active_mask(self, *, timeout_s: float | None = None) -> torch.Tensor:
        """Agree with the other survivors on one mask, and adopt it. All of them call it, between steps.

        Blocks until every active rank has called or is proven dead, at most ``timeout_s`` and a takeover time for each
        rank. The mask stays as it was where it raises.

        Args:
            timeout_s: instead of the knob's ``reconcile_timeout_s``.

        Returns:
            The mask in force, int32 ``[W]``.

        Raises:
            MoEEpRankEvictedError: the others went on without this rank; drop its handles, then
                ``clear_faults(readmit=True)``, or end the process.
            MoEEpNoQuorumError: too few ranks answered. May be tried again.
            MoEEpStoreError: the store did not answer.
            MoEEpConfigError: a step is open.
        """
        agreement = self._guard("reconcile_active_mask", "it talks to a store, which a replay does not repeat")
        self.require_member()
        self._require_idle("reconcile_active_mask")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise config_error("reconcile_active_mask: timeout_s", timeout_s, "a finite number of seconds above 0")
        masked_by_hand = agreement.decision.mask & ~self.faults.mask
        accused = tuple(members(self.faults.accused | masked_by_hand))
        return self._adopt(lambda: agreement.reconcile(accused, self._last_step(), timeout_s=timeout_s))

    def clear_faults(self, *, readmit: bool = False) -> torch.Tensor:
        """Forget accusations, so that detection starts anew; with ``readmit`` also take masked ranks back.

        Args:
            readmit: ``False``: local, at once. ``True``: for the survivors and for those to be taken back alike; it
                blocks until all ranks that are not proven dead have called, at most ``reconcile_timeout_s`` and a
                takeover time for each rank. Whoever did not come stays masked.

        Returns:
            The mask in force, int32 ``[W]``.

        Raises:
            MoEEpRankEvictedError: without ``readmit``, on an evicted Fleet; with it, on one that learns of its
                eviction just now and then calls again.
            MoEEpNoQuorumError, MoEEpStoreError, MoEEpConfigError: as for :meth:`reconcile_active_mask`.
        """
        agreement = self._guard("clear_faults", "it re-arms detection on the host, which a replay does not repeat")
        if not readmit:
            self.require_member()
        self._require_idle("clear_faults")
        if readmit:
            return self._adopt(lambda: agreement.readmit(self._last_step()))
        self.faults.forgive()
        self._mask_changed()
        return self._mask()

    def _adopt(self, agree_on: Callable[[], Decision]) -> torch.Tensor:
        """Come to a decision with the others, and bring this rank in line with it."""
        try:
            decision = agree_on()
            self.faults.adopt(decision.number, mask_list(decision.mask, self.bootstrap.world_size))
            self.faults.forgive()
            self._mask_changed()
            self._resume(decision.resume_step)
        except MoEEpRankEvictedError as error:
            self.faults.evicted, self._eviction = True, str(error)
            raise
        finally:
            self._leave_round()
        return self._mask()

    def _mask(self) -> torch.Tensor:
        return torch.tensor(self.faults.active(), dtype=torch.int32, device=self.bootstrap.device)

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
        with meeting.announcing():
            wanted = replace(self.spec, bootstrap=bootstrap, meeting=meeting, placement=where, backend=self.name)
            spec, _ = agree(wanted)
            with torch.inference_mode(False):
                self._retopologise(meeting, where)
        self.spec = spec
        meeting.close()

    def _require_idle(self, call: str) -> None:
        if count := self._open_steps():
            raise config_error(call, f"{count} open steps", "none", "combine or destroy the handles first")
        self._settle()

    def _guard(self, call: str, why_not_captured: str) -> Agreement:
        if self.tolerance is None or self.agreement is None:
            raise self._no_fault_tolerance(call)
        if capturing():
            raise MoEEpFaultToleranceUnsupportedError(
                f"{call} under CUDA-graph capture: {why_not_captured}; call it between replays"
            )
        self._require_built()
        return self.agreement
