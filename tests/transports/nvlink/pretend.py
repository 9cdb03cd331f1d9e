"""A process whose CPU is a GPU: the whole nvlink Fleet in ranks that are processes, which can be killed and stopped.

Kernels run under Triton's interpreter, one program each, in memory that the processes map; waits really wait. What is
replaced is the device: ``torch.cuda`` as the transport sees it, symmetric memory, and the poll.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl

from moefleet import NVLinkConfig
from moefleet.fleet import streams, tolerance
from moefleet.substrate.symmetric import SymmetricMemory
from moefleet.transports.nvlink import counts, engine, fleet, handle, launch, notes, outputs, topology
from moefleet.transports.nvlink.kernels import judging, signals, waiting
from tests.transports.nvlink import interpreter  # noqa: F401 - the kernels run under it

CONFIG = NVLinkConfig(programs=1)
SLICE_NS = 20_000_000
"""Between two looks of a wait; kernels are a thousand times slower than on a GPU."""


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Torch:
    """``torch`` of a transport's module, with a CPU for its GPU."""

    cuda = SimpleNamespace(
        is_available=lambda: True,
        device=lambda _: contextlib.nullcontext(),
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        current_stream=_Stream,
        is_current_stream_capturing=lambda: False,
        is_initialized=lambda: False,
        stream=lambda _: contextlib.nullcontext(),
        Stream=_Stream,
        ExternalStream=_Stream,
        get_device_properties=lambda _: SimpleNamespace(multi_processor_count=1),
    )
    _C = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: 1, _cuda_isCurrentStreamCapturing=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int = 0) -> torch.device:
        return torch.device("cpu", index) if kind == "cuda" else torch.device(kind)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


_files: dict[int, Any] = {}
"""Of memory that is allocated and not yet mapped by all, by address."""


def allocate(size: int, device: torch.device, world_size: int) -> torch.Tensor:
    """Memory that all ranks can map, each rank's in a file of its own."""
    file = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115 - closed when all have mapped it
    file.truncate(size)
    own = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    _files[own.data_ptr()] = file
    return own


def share(own: torch.Tensor, *, rank: int, world_size: int, store: Any, name: str) -> SymmetricMemory:
    size = own.nbytes
    with _files.pop(own.data_ptr()) as file:
        store.set(f"{name}/{rank}", f"/proc/{os.getpid()}/fd/{file.fileno()}")
        everybody = []
        for peer in range(world_size):
            path = Path(store.get(f"{name}/{peer}").decode())
            with open(path, "r+b") as theirs:
                everybody.append(
                    own if peer == rank else torch.frombuffer(mmap.mmap(theirs.fileno(), size), dtype=torch.uint8)
                )
        store.add(f"{name}/mapped", 1)
        while store.add(f"{name}/mapped", 0) < world_size:
            time.sleep(0.001)
    return SymmetricMemory(own, tuple(memory.data_ptr() for memory in everybody), everybody)


def poll(flag: Any, value: Any, budget_ns: Any) -> Any:
    """As on a GPU; looking now and then."""
    end = time.perf_counter_ns() + _number(budget_ns)
    while True:
        late = (tl.load(flag) < value).to(tl.int32)
        if not _number(late) or time.perf_counter_ns() >= end:
            return late
        time.sleep(0.0005)


def pretend() -> None:
    """From now on this process has a GPU, for the nvlink transport alone."""
    for module in (counts, engine, fleet, handle, launch, notes, outputs, streams, topology, tolerance):
        module.torch = _Torch()  # type: ignore[attr-defined]
    fleet.LIMITS = dataclasses.replace(fleet.LIMITS, device_types=frozenset({"cpu"}))
    topology.SymmetricMemory = SimpleNamespace(allocate=allocate, map=share)  # type: ignore[assignment, misc]
    signals.poll = judging.poll = waiting.poll = poll
    for module in (judging, waiting):
        module.SLICE_NS = module.SOON_NS = module.ROW_NS = tl.constexpr(SLICE_NS)
        module._ALONE = tl.constexpr(False)


def _number(value: Any) -> int:
    if isinstance(value, tl.constexpr):
        value = value.value
    return int(np.asarray(value.handle.data).item()) if hasattr(value, "handle") else int(value)
