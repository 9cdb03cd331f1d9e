"""The nvlink Fleet: symmetric memory, the engine over it, and what the host looks at between steps."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...config import EpLayout, NVLinkConfig, resolve_device
from ...errors import MoEEpError, config_error
from ...fleet.base import FleetSpec
from ...fleet.limits import Limits
from ...fleet.registry import Capability, register_fleet
from ...fleet.rendezvous import Meeting
from ...fleet.stepping import blame
from ...fleet.streams import stream_at
from ...fleet.tolerance import FaultTolerantFleet
from ...knobs import FP8E4M3, FleetAlgoKnob, FleetAlgoKnobQuantization, HandleAlgoKnob
from ...placement import Placement
from ...substrate.control import Operation
from ...substrate.rowtypes import DTYPES
from ...tensors import HandleParams
from .alarm import to_error
from .geometry import CONTROL
from .steps import Steps
from .topology import Topology

if TYPE_CHECKING:
    from .engine import Grids
    from .handle import NVLinkHandle

MOST_TOGETHER = 8
"""Programs to a multiprocessor, at most."""

FEATURES = frozenset({"halves", "graphs", "fault_tolerance"})

LIMITS = Limits(
    device_types=frozenset({"cuda"}),
    layouts=frozenset(EpLayout),
    dtype_bytes=frozenset(DTYPES),
    max_world_size=64,
    quants=frozenset({FP8E4M3}),
)


@register_fleet("nvlink")
class NVLinkFleet(FaultTolerantFleet):
    """GPUs of one host that map each other's memory. See the package docstring for how rows move, ``memory_bytes`` for
    what it takes.

    Attributes: ``checking``, whether MOEFLEET_CHECK is set.

    An error that a kernel meets (a rank that does not come, fails, or brings other sizes; too many rows) is raised by
    the next call of this rank that looks, without a wait for the GPU; with ``MOEFLEET_CHECK=1`` each dispatch and
    combine waits and raises its own.

    With fault tolerance ``query_fault`` says what has reached the host so far: look after the step's output has.
    """

    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = FaultTolerantFleet.knobs | {FleetAlgoKnobQuantization}

    @classmethod
    def probe(cls) -> Capability:
        reason = ""
        if not torch.cuda.is_available():
            reason = "no CUDA GPU"
        elif importlib.util.find_spec("triton") is None:
            reason = "triton is not installed; pip install 'moefleet[gpu]'"
        if reason:
            return Capability(False, reason, limits=LIMITS)
        from ...substrate.sockets import namespace_id

        return Capability(True, features=FEATURES, limits=LIMITS, domain=namespace_id())

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        device = resolve_device(self.bootstrap)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.row_dtypes = DTYPES[self.params.dtype_bytes]
        self._closed, self._last_stream = False, None
        self.checking = os.environ.get("MOEFLEET_CHECK", "") not in ("", "0")
        self._enter(self._build(spec.meeting, self.placement))

    def _build(self, meeting: Meeting, placement: Placement) -> Topology:
        config = self.spec.config if isinstance(self.spec.config, NVLinkConfig) else NVLinkConfig()
        grids = _grids(self.params.resolved_layout, config, self.device)
        return Topology.build(meeting, self.spec, placement, self.device, grids, self.tolerance)

    def _enter(self, topology: Topology) -> None:
        """From now on steps run over this topology."""
        from .outputs import OutputViews

        self._topology, self.generation = topology, topology.generation
        self.bootstrap, self.placement = topology.bootstrap, topology.placement
        self.faults, self.agreement = topology.faults, topology.agreement
        self.geometry, self.engine, self._reader = topology.geometry, topology.engine, topology.reader
        self.views, self.steps = OutputViews(topology.engine), Steps(self._give_up)
        self.failed_steps = self._bad_ids_raised = 0

    def _retopologise(self, meeting: Meeting, placement: Placement) -> None:
        old = self._topology
        self._enter(self._build(meeting, placement))
        old.close()

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> NVLinkHandle:
        from .handle import NVLinkHandle

        self.require_alive()
        if torch.cuda.current_device() != self.device.index:
            got = f"cuda:{torch.cuda.current_device()}"
            raise config_error("current CUDA device", got, str(self.device), "call torch.cuda.set_device first")
        return NVLinkHandle(self, params, algo_knobs)

    def destroy(self) -> None:
        """Drop the memory. What peers have mapped of it lives until they let go, so they are not waited for."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):  # a lost GPU is no reason to fail here
            if self.bootstrap.world_size > 1:
                stream, _ = self.ordered_stream()
                for slot in self.steps.open_slots:  # peers wait for this rank's part of these
                    note = self._note("its Fleet was destroyed before the step was combined", fresh=False)
                    self.engine.fail(slot, stream, note, fresh=False, wait=False)
                self.engine.depart(stream)
            torch.cuda.synchronize(self.device)
            self._reader.read(self._last_stream)
        self._topology.close()
        del self.engine, self.views, self._topology

    def stats(self) -> dict[str, Any]:
        """See :meth:`moefleet.fleet.Fleet.stats`; also ``memory_bytes`` of this GPU by kind.

        Steps that graphs replay count too. ``tokens`` and ``rows_sent`` count steps that were combined. ``waited_s`` is
        how long one program waited for each rank's header in dispatch and for its start of combine. Waits for this
        Fleet's work on the GPU; while this thread captures a graph, the counts read last are given.
        """
        kinds = self.geometry
        return {
            **self._reader.stats(self._last_stream),
            "failed_steps": self.failed_steps,
            "memory_bytes": {
                "shared": kinds.shared_bytes,
                "output": kinds.output_bytes,
                "private": kinds.private_bytes,
            },
        }

    def quiet(self) -> bool:
        """Whether there is nothing to raise: one look at two words."""
        return not (self._closed or self.engine.alarm_word() or self.faults.evicted)

    def return_slot(self, slot: torch.Tensor, *, captured: bool = False) -> None:
        """Take a handle's slot back, for the next one; one that was captured is kept for the graphs that use it."""
        if not self._closed:
            self.engine.return_slot(slot, captured=captured)

    def _require_built(self) -> None:
        if self._closed:
            raise MoEEpError("this Fleet was destroyed; build another with create_fleet")

    def require_alive(self) -> None:
        """Raise what a kernel reported, or where no step can run: destroyed, or evicted."""
        super().require_alive()
        if self.engine.alarm_word():
            self._raise_alarm(self.engine.alarm_word())

    def require_replayable(self) -> None:
        """As require_alive; also raise while a step is open, whose rows a replay could overwrite.

        What is replayed next on the current stream comes after this Fleet's work on others.
        """
        self.require_alive()
        if self.steps.open:
            raise config_error(
                "replay",
                f"a captured step while steps {self.steps.open} are not combined",
                "no open step",
                "combine it (or destroy its handle) first",
            )
        self.ordered_stream()

    def check_now(self) -> None:
        """With MOEFLEET_CHECK=1: wait for the GPU and raise what this step met, out-of-range ids included."""
        if not self.checking or torch._C._cuda_isCurrentStreamCapturing():
            return
        torch.cuda.synchronize(self.device)
        self.require_alive()
        seen, self._bad_ids_raised = self._bad_ids_raised, int(self.engine.control[CONTROL.bad_ids])
        if bad := self._bad_ids_raised - seen:
            allowed = f"-1 (no expert) to {self.params.num_experts - 1}"
            raise config_error("topk_ids", f"{bad} ids out of range", allowed, "check the router")

    def ordered_stream(self) -> tuple[int, bool]:
        """The stream to launch on, after all earlier work of this Fleet, and whether it is being captured."""
        stream, captured = self.bootstrap.stream, torch._C._cuda_isCurrentStreamCapturing()
        if captured or not stream:
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if captured:
            self._last_stream = None
        elif stream != self._last_stream:
            if self._last_stream is not None:
                stream_at(stream, self.device).wait_stream(stream_at(self._last_stream, self.device))
            self._last_stream = stream
        return stream, captured

    def _give_up(self, slot: torch.Tensor | None, error: BaseException | str) -> None:
        """Take part in a step without rows, because of ``error``: in one that was dispatched with ``slot``, or in the
        next."""
        if self._closed or torch.cuda.is_current_stream_capturing():
            return
        stream, _ = self.ordered_stream()
        fresh, slot = slot is None, self._topology.spare if slot is None else slot
        with torch.cuda.device(self.device):
            self.engine.fail(slot, stream, self._note(error, fresh=fresh), fresh=fresh)

    def _note(self, error: BaseException | str, *, fresh: bool) -> torch.Tensor:
        """What peers are told of a step that is given up before (``fresh``) or after its rows were sent."""
        operation = Operation.DISPATCH if fresh else Operation.COMBINE
        return self._topology.notes.write(operation, *blame(error, self.bootstrap.rank))

    def _raise_alarm(self, word: int) -> None:
        capacity, timeout_s = self.params.recv_capacity(self.bootstrap.world_size), self.bootstrap.timeout_s
        if torch.cuda.is_current_stream_capturing():
            raise to_error(word, capacity, timeout_s)
        error = to_error(word, capacity, timeout_s, self._topology.notes.read)
        stream, _ = self.ordered_stream()
        with torch.cuda.device(self.device), torch.cuda.stream(stream_at(stream, self.device)):
            self.engine.clear_alarm()
        raise error

    def _open_steps(self) -> int:
        return len(self.steps.open)

    def _settle(self) -> None:
        torch.cuda.synchronize(self.device)
        self._look_for_deaths()

    def _look_for_deaths(self) -> None:
        self._topology.look()

    def _mask_changed(self) -> None:
        self.engine.count_only(self.faults.active())
        torch.cuda.synchronize(self.device)  # steps may run on any stream

    def _last_step(self) -> int:
        return self.engine.last_step

    def _resume(self, step: int) -> None:
        self.engine.resume(step, self.faults.epoch)
        torch.cuda.synchronize(self.device)

    def _leave_round(self) -> None:
        self._topology.leave_round()

    def _mask(self) -> torch.Tensor:
        return self.engine.mask.clone()

    _last_stream: int | None


def _grids(layout: EpLayout, config: NVLinkConfig, device: torch.device) -> tuple[Grids, Grids]:
    """Programs for dispatch and combine: few enough that all are on the GPU at once."""
    from .engine import Grids

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # Measured on two H200s: expert-major and flat move rows locally as well, which many small programs do best.
    together, warps = {EpLayout.EXPERT_MAJOR: (2, 4), EpLayout.RANK_MAJOR: (1, 8), EpLayout.FLAT: (4, 4)}[layout]
    programs = config.programs or together * processors
    if programs > MOST_TOGETHER * processors:
        raise config_error(
            "NVLinkConfig.programs",
            programs,
            f"at most {MOST_TOGETHER * processors} on this GPU",
            "programs wait for peers, so all of them have to fit on the GPU at once",
        )
    senders = config.senders or (programs if layout is not EpLayout.FLAT else max(1, programs // 2))
    grids = Grids.fitting(programs, min(senders, programs), warps, processors)
    return grids, grids
