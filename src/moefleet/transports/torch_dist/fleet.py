"""The torch_dist Fleet: its group, its rounds and its memory, made once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from ...config import EpLayout
from ...errors import MoEEpError, MoEEpFaultToleranceUnsupportedError
from ...fleet.base import Fleet, FleetSpec, row_bytes
from ...fleet.limits import Limits
from ...fleet.registry import Capability, register_fleet
from ...fleet.rendezvous import Meeting
from ...knobs import (
    FP8E4M3,
    FleetAlgoKnob,
    FleetAlgoKnobFaultTolerance,
    FleetAlgoKnobQuantization,
    HandleAlgoKnob,
)
from ...substrate.control import SETS
from ...substrate.inbox import DeviceInbox, Inbox
from ...substrate.rowtypes import DTYPES
from ...substrate.tally import ExpertTally
from ...tensors import HandleParams
from .bus import Bus
from .group import Group, backend_of, device_of
from .handle import TorchDistHandle
from .janitor import Janitor
from .presence import Presence
from .steps import Steps
from .wire import Wire, on_stream

LIMITS = Limits(
    device_types=frozenset({"cpu", "cuda"}),
    layouts=frozenset(EpLayout),
    dtype_bytes=frozenset(DTYPES),
    quants=frozenset({FP8E4M3}),
)


@register_fleet("torch_dist")
class TorchDistFleet(Fleet):
    """Ranks of any ``torch.distributed`` process group. See the package docstring for how rows move.

    ``bootstrap.rank`` is this process's rank in ``bootstrap.process_group``, where that is given. A gloo group (for CPU
    tensors) or an NCCL group of our own is made over the store, beside it or without one; see ``group.py``.

    Memory per rank: two received buffers and two for the way back of ``C * H * dtype_bytes`` (C = ``M*W``, or
    max_recv_tokens_per_rank), of which on a CPU only what is used is ever touched, and what is in flight. Received fp8
    rows take a byte per element, and their scales 4 for 128 of them.
    """

    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = frozenset({FleetAlgoKnobQuantization})
    why_not: ClassVar[dict[type[FleetAlgoKnob], str]] = {
        FleetAlgoKnobFaultTolerance: "torch_dist runs collectives, and a collective cannot skip a dead member; leave "
        "the knob out, or choose a transport with fault tolerance"
    }

    @classmethod
    def probe(cls) -> Capability:
        if not dist.is_available():
            return Capability(False, "this torch was built without torch.distributed", limits=LIMITS)
        return Capability(True, features=frozenset({"halves", "combine_buffer"}), limits=LIMITS)

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        params, meeting = self.params, spec.meeting
        rank = self.bootstrap.rank
        self.device = device_of(self.bootstrap)
        self.row_dtypes = DTYPES[params.dtype_bytes]
        self.num_local = self.placement.num_local(rank)
        self.local_table = np.append(self.placement.local_table(rank).numpy(), -1)
        self.owner_table = np.append(self.placement.owner_table.numpy(), -1)
        self._inboxes = [self._new_inbox() for _ in range(SETS)]
        self._homes: list[torch.Tensor | None] = [None] * SETS

        def prepare() -> dict[str, Any]:
            backend_of(self.bootstrap, self.device)
            return {}

        def connect() -> dict[str, Any]:
            self._group = Group(self.bootstrap, self.device, meeting)
            return {}

        meeting.exchange("torch_dist", prepare)  # so that a mistake is told before anybody waits for links
        try:
            meeting.exchange("connect", connect)
            self._build(meeting)
        except BaseException:
            if group := getattr(self, "_group", None):
                group.close(clean=self.device.type == "cpu")
            raise

    def _build(self, meeting: Meeting) -> None:
        """What needs the group."""
        rank, world = self.bootstrap.rank, self.bootstrap.world_size
        self.wire = Wire.on(self._group.handle, self.device, self._group.limit_s)
        sizes = self.params.max_tokens_per_rank, self.params.max_topk
        self.bus = Bus(self.wire, rank, world, meeting.fleet_id, self.row_format, *sizes)
        self._presence = Presence(meeting.store, rank, [meeting.person(peer) for peer in range(world)])
        self._janitor = Janitor(self.bus, self.bootstrap.timeout_s)
        self.steps = Steps(self.bus, self._presence, self._janitor, self.bootstrap.timeout_s)
        self._alive = True
        self.rows_received = np.zeros(world, np.int64)
        self.rows_sent = np.zeros(world, np.int64)
        self.expert_rows = ExpertTally(self.num_local)
        self.failed_steps = self.tokens_sent = self.bad_ids = 0
        self.checks = os.environ.get("MOEFLEET_CHECK", "") == "1"

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> TorchDistHandle:
        self.require_alive()
        return TorchDistHandle(self, params, algo_knobs)

    def destroy(self) -> None:
        if not self._alive:
            return
        self._alive = False
        for step in self.steps.open_steps:
            self.steps.fail(step, "its Fleet was destroyed")
        self._presence.say_left()
        on_gpu = self.device.type == "cuda"  # elsewhere a collective that never ends holds nobody up
        self._janitor.finish(self._let_go, lambda: on_gpu and bool(self._presence.find_gone(0.0)))

    def stats(self) -> dict[str, Any]:
        """As for every Fleet, and besides: ``collectives`` issued, ``carried_bytes`` that they took to other ranks,
        statuses and padding included, and ``waited_for_all_s``, as a collective does not tell for whom."""
        world = self.bootstrap.world_size
        taken, given = self.rows_received.tolist(), self.rows_sent.tolist()
        return {
            "steps": self.steps.last,
            "failed_steps": self.failed_steps,
            "tokens": self.tokens_sent,
            "tokens_per_expert": self.expert_rows.tolist(),
            "rows_received": taken,
            "rows_sent": given,
            "bytes_received": row_bytes(self.row_format, there=taken, back=given),
            "bytes_sent": row_bytes(self.row_format, there=given, back=taken),
            "waited_s": [None] * world,
            "bad_ids": self.bad_ids,
            "collectives": self.bus.rounds + self.bus.exchanges,
            "carried_bytes": self.bus.carried_bytes,
            "waited_for_all_s": self.steps.waited_s,
        }

    # What a handle works with.

    def require_alive(self) -> None:
        """Raise MoEEpError once the Fleet was destroyed."""
        if not self._alive:
            raise MoEEpError("this Fleet was destroyed; build another with create_fleet")

    def inbox(self, step: int) -> Inbox:
        """Where this step's rows are received."""
        return self._inboxes[step % SETS]

    def home(self, step: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this step's rows on their way back, ``[C, H]``."""
        p = self.params
        if (memory := self._homes[step % SETS]) is None:
            size = p.recv_capacity(self.bootstrap.world_size) * self.row_format.returned_bytes
            memory = self._homes[step % SETS] = self.wire.empty(size)
        return memory.view(dtype).view(-1, p.token_hidden_size)

    def on_stream(self) -> Any:
        """A context in which work goes to the Fleet's stream."""
        return on_stream(self.device, self.bootstrap.stream)

    def _new_inbox(self) -> Inbox:
        form = self.row_format
        carried = replace(self.params, dtype_bytes=form.there_bytes, scale_bytes_per_token=form.scale_bytes)
        sizes = carried, self.bootstrap.world_size, self.num_local
        return Inbox(*sizes) if self.device.type == "cpu" else DeviceInbox(*sizes, self.device)

    def _let_go(self, clean: bool) -> None:
        self.bus.stop()
        self._group.abort()  # before anything that waits for the GPU, which a collective without peers never leaves
        self.bus.drop()
        self._group.close(clean)

    def _no_fault_tolerance(self, call: str) -> MoEEpFaultToleranceUnsupportedError:
        return MoEEpFaultToleranceUnsupportedError(f"{call}: {self.why_not[FleetAlgoKnobFaultTolerance]}")
