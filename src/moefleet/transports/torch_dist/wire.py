"""One all_to_all_single under way, on the CPU or on a GPU, waited for in slices."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ...fleet.streams import stream_at
from ...substrate.device_gather import movements, upload
from .status import Bytes

_SPARE = 3  # rounds whose memory waits to be used again: one arrives, two steps may be open
_SPIN_S, _NAP_S = 0.002, 5e-5


class Flight(Protocol):
    """A collective that was issued. ``seen`` is what the host may read of its output, once it is done."""

    seen: Bytes

    def done(self) -> bool:
        """Whether it has ended, well or badly; never waits."""

    def wait(self, seconds: float) -> bool:
        """Wait up to this long; whether it has ended well. Raises RuntimeError where it failed."""


class Lease:
    """Memory that is used again once nobody holds this."""

    def __init__(self, memory: torch.Tensor, size: int, spare: list[torch.Tensor]) -> None:
        self.memory, self._whole, self._spare = memory[:size], memory, spare

    def __del__(self) -> None:
        if len(self._spare) < _SPARE:
            self._spare.append(self._whole)


class Wire:
    """The collectives of a Fleet whose tensors are on the CPU. Memory is used again, as fresh pages cost as much as
    copying.

    Args:
        group: a ``torch.distributed`` process group or one of its backends.
        device: where tensors live.
        limit_s: when a collective gives up by itself; ``None``: as the group has it.

    Attributes:
        moves: of rows where tensors live.
    """

    def __init__(self, group: Any, device: torch.device, limit_s: float | None) -> None:
        self._group, self.device, self.moves = group, device, movements(device)
        self._options = dist.AllToAllOptions()
        if limit_s is not None:
            self._options.timeout = timedelta(seconds=limit_s)
        self._rooms: dict[tuple[str, int], torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []

    @staticmethod
    def on(group: Any, device: torch.device, limit_s: float | None) -> Wire:
        return (CudaWire if device.type == "cuda" else Wire)(group, device, limit_s)

    def empty(self, *shape: int) -> torch.Tensor:
        with torch.inference_mode(False):  # some of it outlasts the caller's mode
            return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def room(self, name: tuple[str, int], size: int) -> torch.Tensor:
        """Uint8 ``[size]`` of memory that is used again for this name."""
        memory = self._rooms.get(name)
        if memory is None or memory.shape[0] < size:
            memory = self._rooms[name] = self.empty(size + size // 8)
        return memory[:size]

    def lease(self, size: int) -> Lease:
        """Uint8 ``[size]`` of memory that is used again when the lease ends."""
        while self._spare:
            memory = self._spare.pop()
            if memory.shape[0] >= size:
                return Lease(memory, size, self._spare)
        return Lease(self.empty(size + size // 8), size, self._spare)

    def forget(self, names: Sequence[tuple[str, int]]) -> None:
        """Use other memory for these names from now on."""
        for name in names:
            self._rooms.pop(name, None)

    def stamp(self, blocks: torch.Tensor, at: int, line: Bytes) -> None:
        """Write these bytes into each block ``[W, capacity]``, from byte ``at`` on."""
        blocks.numpy()[:, at:] = line

    def mark(self) -> torch.cuda.Event | None:
        """The point up to which the current stream has packed what is going to be sent."""
        return None

    def follow(self, mark: torch.cuda.Event | None, tensors: Collection[torch.Tensor]) -> None:
        """The current stream is going to read these, which another may have packed up to this mark."""

    def lend(self, tensors: Collection[torch.Tensor]) -> None:
        """The current stream is going to read these outputs, which are there."""

    def exchange(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_rows: Sequence[int] = (),
        rows: Sequence[int] = (),
        *,
        look: torch.Tensor | None = None,
        after: Sequence[torch.cuda.Event | None] = (),
    ) -> Flight:
        """Issue one all_to_all_single of bytes.

        Args:
            out, source: ``[n, bytes]``.
            out_rows, rows: lines from and for each rank; none: equal parts.
            look: the part of ``out`` that the host needs to read.
            after: marks that come before.
        """
        work = self._issue(out, source, out_rows, rows)
        return _HostFlight(work, _EMPTY if look is None else look.numpy(), (out, source))

    def drop(self) -> None:
        """Let go of the group, and of memory that is used again."""
        self._group = None
        self._rooms.clear()
        self._spare.clear()

    def _issue(self, out: torch.Tensor, source: torch.Tensor, out_rows: Sequence[int], rows: Sequence[int]) -> Any:
        return self._group.alltoall_base(out, source, list(out_rows), list(rows), self._options)


_EMPTY: Bytes = np.empty(0, np.uint8)


class _HostFlight:
    def __init__(self, work: Any, seen: Bytes, keep: tuple[torch.Tensor, ...]) -> None:
        self._work, self.seen, self._keep = work, seen, keep

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # completed meanwhile: raises if it failed
        return True


class CudaWire(Wire):
    """The same with tensors on a GPU.

    Collectives and the copies that the host reads run on a stream of their own, so that the caller's stream goes on
    with its work until it takes what has come.
    """

    def __init__(self, group: Any, device: torch.device, limit_s: float | None) -> None:
        super().__init__(group, device, limit_s)
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):  # the kernel of this copy is loaded now, not under a collective
            lines = torch.zeros(2, 4, dtype=torch.uint8, device=device)[:, 2:]
            torch.empty(lines.shape, dtype=torch.uint8, device=device).copy_(lines)

    # torch's allocator keeps memory, and knows which stream still uses it.

    def room(self, name: tuple[str, int], size: int) -> torch.Tensor:
        return self.empty(size)

    def lease(self, size: int) -> Lease:
        return Lease(self.empty(size), size, [])

    def stamp(self, blocks: torch.Tensor, at: int, line: Bytes) -> None:
        blocks[:, at:] = upload([line], self.device)[0]

    def mark(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event()

    def follow(self, mark: torch.cuda.Event | None, tensors: Collection[torch.Tensor]) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)
            self.lend(tensors)

    def lend(self, tensors: Collection[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def exchange(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_rows: Sequence[int] = (),
        rows: Sequence[int] = (),
        *,
        look: torch.Tensor | None = None,
        after: Sequence[torch.cuda.Event | None] = (),
    ) -> Flight:
        for tensor in (out, source):
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            # Before the collective is under way: taking memory may wait for the GPU, and so for the peers.
            host = staged = None
            if look is not None:
                host = torch.empty(look.shape, dtype=torch.uint8, pin_memory=True)
                staged = torch.empty(look.shape, dtype=torch.uint8, device=self.device)
            for event in after:
                if event is not None:
                    self._stream.wait_event(event)
            work = self._issue(out, source, out_rows, rows)
            work.wait()  # orders the stream; the host goes on
            if look is not None and host is not None and staged is not None:
                host.copy_(staged.copy_(look), non_blocking=True)
            seen = _EMPTY if host is None else host.numpy()
            return _DeviceFlight(work, seen, (out, source), self._stream.record_event())


class _DeviceFlight:
    def __init__(self, work: Any, seen: Bytes, keep: tuple[torch.Tensor, ...], event: torch.cuda.Event) -> None:
        self._work, self.seen, self._keep, self._event = work, seen, keep, event

    def done(self) -> bool:
        return self._event.query()

    def wait(self, seconds: float) -> bool:
        start = time.perf_counter()
        while not self._event.query():
            spent = time.perf_counter() - start
            if spent >= seconds:
                return False
            if spent > _SPIN_S:
                time.sleep(_NAP_S)
        return True


_ANY_STREAM: AbstractContextManager[Any] = nullcontext()


def on_stream(device: torch.device, raw: int) -> AbstractContextManager[Any]:
    """A context in which work on ``device`` goes to the stream with this raw handle; 0 is the current one."""
    if device.type != "cuda" or raw == 0:
        return _ANY_STREAM
    return torch.cuda.stream(stream_at(raw, device))
