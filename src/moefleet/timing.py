"""Where the time of a layer's forward goes: its phases timed, and named for profilers. Runs only where asked for."""

from __future__ import annotations

import time
from types import TracebackType

import torch
from torch.autograd import profiler

PHASES = ("route", "dispatch", "compute", "combine")
"""Of a forward, in this order: read ids and weights, send and receive tokens, run experts, send and sum rows."""

_MARKS = len(PHASES) + 2  # its begin, the end of each phase, its end


class _HostMarks:
    """Moments on this thread's clock."""

    def __init__(self) -> None:
        self._at: list[float] = []

    def restart(self) -> None:
        self._at.clear()

    def mark(self) -> None:
        self._at.append(time.perf_counter())

    def __len__(self) -> int:
        return len(self._at)

    def between_ms(self, first: int, second: int) -> float:
        return 1000 * (self._at[second] - self._at[first])


class _CudaMarks:
    """Moments on a GPU's current stream. Marking waits for nothing, reading waits until the last one has come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(_MARKS)]
        self._taken = 0

    def restart(self) -> None:
        self._taken = 0

    def mark(self) -> None:
        self._events[self._taken].record(torch.cuda.current_stream(self._device))
        self._taken += 1

    def __len__(self) -> int:
        return self._taken

    def between_ms(self, first: int, second: int) -> float:
        self._events[second].synchronize()
        return self._events[first].elapsed_time(self._events[second])


class Watch:
    """Watches the forwards of one layer, as ``with watch.forward(device):`` around ``with watch.phase(name):``.

    Args:
        timing: take the time of each phase: on a CPU the host's, on a GPU with events, unless a graph is captured.
        ranges: name ranges ``moefleet.forward`` and ``moefleet.<phase>`` for whatever listens to torch's
            record_function, and for NVTX on a GPU. Without it they are named only while torch's own profiler records,
            as a range costs as much as a small phase.
    """

    def __init__(self, timing: bool, ranges: bool) -> None:
        self.timing, self.ranges = timing, ranges
        self._kept: dict[torch.device, _HostMarks | _CudaMarks] = {}
        self._marks: _HostMarks | _CudaMarks | None = None
        self._device = torch.device("cpu")
        self._phases = {name: _Phase(self, name) for name in PHASES}
        self._forward = _Forward(self, "forward")

    def forward(self, device: torch.device) -> _Forward:
        """A context around one forward whose tensors are on ``device``."""
        self._device = device
        return self._forward

    def phase(self, name: str) -> _Phase:
        """A context around one of its phases."""
        return self._phases[name]

    def timings_ms(self) -> dict[str, float]:
        """Milliseconds of each phase and in ``total``, of the last forward; empty where that was not timed whole."""
        marks = self._marks
        if marks is None or len(marks) < _MARKS:
            return {}
        times = {name: marks.between_ms(at, at + 1) for at, name in enumerate(PHASES)}
        return {**times, "total": marks.between_ms(0, _MARKS - 1)}

    def restart(self) -> None:
        """Drop the times of the last forward, and begin with those of this one."""
        self._marks = None
        on_gpu = self._device.type == "cuda"
        if not self.timing or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        if self._device not in self._kept:
            self._kept[self._device] = _CudaMarks(self._device) if on_gpu else _HostMarks()
        self._marks = self._kept[self._device]
        self._marks.restart()
        self._marks.mark()

    def mark(self) -> None:
        if self._marks is not None:
            self._marks.mark()

    def open_range(self, name: str) -> _Range | None:
        if self.ranges or profiler._is_profiler_enabled:
            return _Range(name, nvtx=self.ranges and self._device.type == "cuda")
        return None


class _Range:
    """An open range, until it is closed."""

    def __init__(self, name: str, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._recorded = profiler.record_function(name)
        self._recorded.__enter__()
        if nvtx:
            torch.cuda.nvtx.range_push(name)

    def close(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._recorded.__exit__(None, None, None)


class _Phase:
    """A phase, entered once in each forward; one that raises is not marked, so the forward has no times."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch, self._name = watch, f"moefleet.{name}"
        self._range: _Range | None = None

    def __enter__(self) -> None:
        self._range = self._watch.open_range(self._name)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._watch.mark()
        if self._range is not None:
            self._range.close()
            self._range = None


class _Forward(_Phase):
    def __enter__(self) -> None:
        super().__enter__()
        self._watch.restart()
