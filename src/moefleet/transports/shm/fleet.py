"""The shm Fleet: its memory and the views that a step needs, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...config import EpLayout, ShmConfig
from ...errors import MoEEpError
from ...fleet.base import FleetSpec, row_bytes
from ...fleet.limits import Limits
from ...fleet.registry import Capability, register_fleet
from ...fleet.rendezvous import Meeting
from ...fleet.tolerance import FaultTolerantFleet
from ...knobs import FP8E4M3, FleetAlgoKnob, FleetAlgoKnobQuantization, HandleAlgoKnob
from ...placement import Placement
from ...substrate.control import MAX_RANKS
from ...substrate.futex import unsupported_reason
from ...substrate.rowtypes import DTYPES
from ...substrate.sockets import namespace_id
from ...tensors import HandleParams
from .handle import ShmHandle
from .topology import Topology

FEATURES = frozenset({"halves", "combine_buffer", "fault_tolerance"})

PLACE_BYTES = 1 << 18
"""What :attr:`ShmConfig.place_bytes` is by default."""

LIMITS = Limits(
    device_types=frozenset({"cpu"}),
    layouts=frozenset(EpLayout),
    max_world_size=MAX_RANKS,
    quants=frozenset({FP8E4M3}),
)


@register_fleet("shm")
class ShmFleet(FaultTolerantFleet):
    """Ranks of one host over shared memory. See the package docstring for how rows move.

    Memory per rank: ``2 * (M * H + C * H) * dtype_bytes`` shared (C = ``M*W``, or max_recv_tokens_per_rank), all of it
    taken at construction, and the two received buffers. In RANK_MAJOR and FLAT these are shared too, another
    ``2 * C * H * dtype_bytes`` taken at construction; of ``[L, M*W, H]`` in EXPERT_MAJOR, and as much for what experts
    make of it, memory is taken as rows arrive: theirs, or where an expert has 256 KiB of them huge pages, eight times
    theirs at most. Without the compiled helper, and while a rank is masked, received buffers are private. The memory
    of the last three results is kept for later ones of their shape.

    :meth:`stats` also has ``native``: whether the compiled helper does the work.
    """

    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = FaultTolerantFleet.knobs | {FleetAlgoKnobQuantization}

    @classmethod
    def probe(cls) -> Capability:
        if reason := unsupported_reason():
            return Capability(False, reason, limits=LIMITS)
        return Capability(True, features=FEATURES, limits=LIMITS, domain=namespace_id())

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        self.device = torch.device("cpu")
        self.row_dtypes = DTYPES[self.params.dtype_bytes]
        self._config = spec.config if isinstance(spec.config, ShmConfig) else ShmConfig()
        self.place_bytes = PLACE_BYTES if self._config.place_bytes is None else self._config.place_bytes
        self._enter(self._build(spec.meeting, self.placement))

    def _build(self, meeting: Meeting, placement: Placement) -> Topology:
        params = replace(self.params, scale_bytes_per_token=self.row_format.scale_bytes)
        return Topology.build(meeting, params, placement, self._config, self.tolerance)

    def _enter(self, topology: Topology) -> None:
        """From now on steps run over this topology."""
        self.topology = topology
        self.bootstrap, self.placement = topology.bootstrap, topology.placement
        self.faults, self.group, self.steps = topology.faults, topology.group, topology.steps
        self.buffers, self.moves = topology.buffers, topology.moves
        self.agreement = topology.agreement
        self.owner_table = topology.owner_table
        self.placing, self.whole = topology.places, topology.whole
        self.places_alone = self.params.layout is EpLayout.RANK_MAJOR
        self.failed_steps = self.tokens_sent = 0

    def _retopologise(self, meeting: Meeting, placement: Placement) -> None:
        old = self.group
        self._enter(self._build(meeting, placement))
        old.close()

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> ShmHandle:
        self.require_alive()
        return ShmHandle(self, params, algo_knobs)

    def require_alive(self) -> None:
        if self.group.closed or self.faults.evicted:
            super().require_alive()

    def calm(self) -> bool:
        """Whether a step needs no closer look: all ranks take part, trust each other, and place rows."""
        faults = self.faults
        return self.placing and not (faults.accused or faults.evicted or self.group.closed)

    def destroy(self) -> None:
        self.group.close()
        if self.whole is not None:
            self.whole.results.close()

    def _open_steps(self) -> int:
        return len(self.steps.open)

    def _look_for_deaths(self) -> None:
        for peer in self.group.gone():
            self.faults.accuse(peer)

    def _mask_changed(self) -> None:
        self.moves.set_owners(self.topology.live_owner_table())
        # A rank that is masked may be alive, and in the middle of placing rows.
        self.placing = self.topology.places and self.faults.mask == self.faults.everybody

    def _last_step(self) -> int:
        return self.steps.last

    def _resume(self, step: int) -> None:
        self.steps.resume(step)

    def _leave_round(self) -> None:
        self.group.leave_round(self.faults.epoch)

    def stats(self) -> dict[str, Any]:
        taken, given = self.moves.rows_received.tolist(), self.moves.rows_sent.tolist()
        return {
            "steps": self.steps.last,
            "failed_steps": self.failed_steps,
            "tokens": self.tokens_sent,
            "tokens_per_expert": self.moves.tokens_per_expert(),
            "rows_received": taken,
            "rows_sent": given,
            "bytes_received": row_bytes(self.row_format, there=taken, back=given),
            "bytes_sent": row_bytes(self.row_format, there=given, back=taken),
            "waited_s": self.group.waiter.waited_s.tolist(),
            "bad_ids": 0,
            "native": self.moves.in_c,
        }

    def _require_built(self) -> None:
        if self.group.closed:
            raise MoEEpError("this Fleet was destroyed; build another with create_fleet")
