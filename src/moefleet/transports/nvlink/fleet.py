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
from ...fleet.base import Fleet, FleetSpec
from ...fleet.limits import Limits
from ...fleet.registry import Capability, register_fleet
from ...knobs import FleetAlgoKnob, HandleAlgoKnob
from ...substrate.rowtypes import DTYPES
from ...substrate.symmetric import SymmetricMemory
from ...tensors import HandleParams
from .alarm import STICKY, to_error, trouble_in
from .geometry import CONTROL, Geometry
from .steps import Steps

if TYPE_CHECKING:
    from .engine import Grids
    from .handle import NVLinkHandle

MOST_TOGETHER = 8
"""Programs to a multiprocessor, at most."""

LIMITS = Limits(
    device_types=frozenset({"cuda"}),
    layouts=frozenset(EpLayout),
    dtype_bytes=frozenset(DTYPES),
    max_world_size=64,
    scales=False,
)


@register_fleet("nvlink")
class NVLinkFleet(Fleet):
    """GPUs of one NVLink domain. See the package docstring for how rows move, ``memory_bytes`` for what it takes.

    Attributes: ``checking``, whether MOEFLEET_CHECK is set.

    An error that a kernel meets (a rank that does not come, fails, or brings other sizes; too many rows) is raised by
    the next call of this rank that looks, without a wait for the GPU; with ``MOEFLEET_CHECK=1`` each dispatch and
    combine waits and raises its own.
    """

    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = frozenset()

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

        return Capability(True, features=frozenset({"halves", "graphs"}), limits=LIMITS, domain=namespace_id())

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        from .engine import Engine
        from .outputs import OutputViews

        boot, meeting = self.bootstrap, spec.meeting
        device = resolve_device(boot)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.row_dtypes = DTYPES[self.params.dtype_bytes]
        self.failed_steps = 0
        self._closed, self._last_stream = False, None
        self.checking = os.environ.get("MOEFLEET_CHECK", "") not in ("", "0")
        config = spec.config if isinstance(spec.config, NVLinkConfig) else NVLinkConfig()
        self.geometry = Geometry.of(self.params, self.placement, boot.rank)
        with torch.cuda.device(self.device):
            grids = _grids(self.params.resolved_layout, config, self.device)
            self.memory = SymmetricMemory.allocate(
                self.geometry.shared_bytes,
                self.device,
                rank=boot.rank,
                world_size=boot.world_size,
                store=_prefixed(meeting.store),
                name=f"moefleet-{os.getpid() if boot.world_size == 1 else meeting.fleet_id}",
            )
            self.engine = Engine(self.geometry, self.device, self.memory.addresses, *grids, boot.timeout_s)
            self._spare = self.engine.new_slot()
            torch.cuda.synchronize(self.device)
        self.views = OutputViews(self.engine)
        self.steps = Steps(self._give_up)
        meeting.exchange("nvlink/ready", dict)

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
                self.engine.depart(self.ordered_stream()[0])
            torch.cuda.synchronize(self.device)
        del self.engine, self.views, self.memory, self._spare

    def stats(self) -> dict[str, Any]:
        """``steps`` begun (those replayed from graphs too), ``failed_steps``, ``out_of_range_ids``, ``bytes`` of GPU
        memory by kind. Waits for the GPU."""
        control = self.engine.control.tolist()
        kinds = self.geometry
        return {
            "steps": control[CONTROL.launches] // self.engine.dispatch_grid.programs,
            "failed_steps": self.failed_steps,
            "out_of_range_ids": control[CONTROL.bad_ids],
            "bytes": {"shared": kinds.shared_bytes, "output": kinds.output_bytes, "private": kinds.private_bytes},
        }

    def quiet(self) -> bool:
        """Whether there is nothing to raise: one look at two words."""
        return not self._closed and not self.engine.alarm_word()

    def return_slot(self, slot: torch.Tensor) -> None:
        """Take a handle's slot back, for the next one."""
        if not self._closed:
            self.engine.return_slot(slot)

    def require_alive(self) -> None:
        """Raise what a kernel reported, or MoEEpError once the Fleet was destroyed."""
        if self._closed:
            raise MoEEpError("this Fleet was destroyed; build another with create_fleet")
        if self.engine.alarm_word():
            self._raise_alarm(self.engine.alarm_word())

    def check_now(self) -> None:
        """With MOEFLEET_CHECK=1: wait for the GPU and raise what this step met, out-of-range ids included."""
        if not self.checking or torch._C._cuda_isCurrentStreamCapturing():
            return
        torch.cuda.synchronize(self.device)
        self.require_alive()
        if bad := int(self.engine.control[CONTROL.bad_ids]):
            self.engine.control[CONTROL.bad_ids] = 0
            allowed = f"-1 (no expert) to {self.params.num_experts - 1}"
            raise config_error("topk_ids", f"{bad} ids out of range", allowed, "check the router")

    def ordered_stream(self) -> tuple[int, bool]:
        """The stream to launch on, after all earlier work of this Fleet, and whether it is being captured."""
        stream = self.bootstrap.stream or torch._C._cuda_getCurrentRawStream(self.device.index)
        captured = torch._C._cuda_isCurrentStreamCapturing()
        if captured:
            self._last_stream = None
        elif stream != self._last_stream:
            if self._last_stream is not None:
                event = torch.cuda.Event()
                event.record(torch.cuda.ExternalStream(self._last_stream, self.device))
                torch.cuda.ExternalStream(stream, self.device).wait_event(event)
            self._last_stream = stream
        return stream, captured

    def _give_up(self, slot: object) -> None:
        """Take part in a step without rows; in one that was dispatched with ``slot``, or in the next."""
        if self._closed or torch.cuda.is_current_stream_capturing():
            return
        word = self.engine.alarm_word()
        if word and trouble_in(word) in STICKY:
            return
        stream, _ = self.ordered_stream()
        with torch.cuda.device(self.device):
            if isinstance(slot, torch.Tensor):
                self.engine.fail(slot, stream, fresh=False)
            else:
                self.engine.fail(self._spare, stream, fresh=True)

    def _raise_alarm(self, word: int) -> None:
        if trouble_in(word) not in STICKY and not torch.cuda.is_current_stream_capturing():
            self.engine.clear_alarm()
        capacity = self.params.recv_capacity(self.bootstrap.world_size)
        raise to_error(word, capacity, self.bootstrap.timeout_s)

    _last_stream: int | None


def _prefixed(store: Any) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore("nvlink", store)


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
