"""The shm Fleet: its memory and the views that a step needs, made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...config import EpLayout, ShmConfig
from ...errors import MoEEpError
from ...fleet.base import FleetSpec
from ...fleet.limits import Limits
from ...fleet.registry import Capability, register_fleet
from ...fleet.tolerance import FaultTolerantFleet
from ...knobs import HandleAlgoKnob
from ...substrate.control import MAX_RANKS
from ...substrate.futex import unsupported_reason
from ...substrate.group import HostGroup
from ...substrate.rowtypes import DTYPES
from ...substrate.sockets import namespace_id
from ...tensors import HandleParams
from .buffers import Buffers
from .handle import ShmHandle
from .layout import SegmentLayout
from .steps import Steps

FEATURES = frozenset({"halves", "combine_buffer", "fault_tolerance"})
DEFAULT_SILENCE_MS = 2000
"""How long a peer may be silent where the fault-tolerance knob says ``timeout_ms=0``."""

LIMITS = Limits(
    device_types=frozenset({"cpu"}),
    layouts=frozenset(EpLayout),
    dtype_bytes=frozenset(DTYPES),
    max_world_size=MAX_RANKS,
)


@register_fleet("shm")
class ShmFleet(FaultTolerantFleet):
    """Ranks of one host over shared memory. See the package docstring for how rows move.

    Memory per rank: ``2 * (M * H + C * H) * dtype_bytes`` shared (C = ``M*W``, or max_recv_tokens_per_rank), all of it
    taken at construction, and the two received buffers, private, of which only rows that arrive are ever touched.
    """

    @classmethod
    def probe(cls) -> Capability:
        if reason := unsupported_reason():
            return Capability(False, reason, limits=LIMITS)
        return Capability(True, features=FEATURES, limits=LIMITS, domain=namespace_id())

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        params, rank, world = self.params, self.bootstrap.rank, self.bootstrap.world_size
        knob = self.tolerance
        config = spec.config if isinstance(spec.config, ShmConfig) else ShmConfig()
        self.layout = SegmentLayout.of(params, world)
        self.group = HostGroup(
            rank,
            world,
            size=self.layout.size,
            align=self.layout.align,
            exchange=spec.meeting.exchange,
            incarnation=spec.meeting.incarnation,
            spin_s=None if config.spin_us is None else config.spin_us * 1e-6,
            timeout_s=self.bootstrap.timeout_s,
            silence_s=self.bootstrap.timeout_s if knob is None else (knob.timeout_ms or DEFAULT_SILENCE_MS) / 1000,
            faults=self.faults,
        )
        self.steps = Steps(self.group, self.faults)
        self.buffers = Buffers.over(self.group, self.layout, params, self.placement.num_local(rank))
        self.device = torch.device("cpu")
        self.row_dtypes = DTYPES[params.dtype_bytes]
        # Entry -1, for id -1, is the last one.
        self.local_table = np.append(self.placement.local_table(rank).numpy(), -1)
        self.all_owner_table = np.append(self.placement.owner_table.numpy(), -1)
        self.owner_table = self.all_owner_table
        self.rows_received = np.zeros(world, np.int64)
        self.failed_steps = 0

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> ShmHandle:
        self.require_alive()
        self.require_member()
        return ShmHandle(self, params, algo_knobs)

    def destroy(self) -> None:
        self.group.close()

    def _look_for_deaths(self) -> None:
        self.group.waiter.look_for_deaths()

    def _mask_changed(self) -> None:
        active = np.append(np.array(self.faults.active(), bool), False)  # entry -1: nobody
        self.owner_table = np.where(active[self.all_owner_table], self.all_owner_table, -1)

    def stats(self) -> dict[str, Any]:
        """``steps`` begun, ``failed_steps``, ``rows_received`` and ``waited_s`` per peer, all since construction."""
        return {
            "steps": self.steps.last,
            "failed_steps": self.failed_steps,
            "rows_received": self.rows_received.tolist(),
            "waited_s": list(self.group.waiter.waited_s),
        }

    def require_alive(self) -> None:
        """Raise MoEEpError once the Fleet was destroyed."""
        if self.group.closed:
            raise MoEEpError("this Fleet was destroyed; build another with create_fleet")
