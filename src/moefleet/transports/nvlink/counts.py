"""What the kernels counted, read for ``Fleet.stats()`` from any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ...fleet.base import row_bytes
from ...fleet.streams import stream_at
from .geometry import CONTROL

if TYPE_CHECKING:
    from .engine import Engine  # needs Triton


class CountReader:
    """Reads an engine's counts over a stream of its own. Once closed it tells what it read last."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._geometry, self._programs = engine.geometry, engine.dispatch_grid.programs
        self._counting = engine.counts is not None
        self._reading = threading.Lock()
        self._stream = torch.cuda.Stream(engine.device)
        self._host = torch.zeros(engine.control.shape, dtype=torch.int64, pin_memory=True)

    def read(self, last_stream: int | None) -> list[int]:
        """All words, after the work of the current stream and of ``last_stream``."""
        engine = self._engine
        with self._reading:
            if engine is not None and not torch.cuda.is_current_stream_capturing():
                with torch.cuda.device(engine.device):
                    self._stream.wait_stream(torch.cuda.current_stream())
                    if last_stream is not None:
                        self._stream.wait_stream(stream_at(last_stream, engine.device))
                    with torch.cuda.stream(self._stream):
                        self._host.copy_(engine.control, non_blocking=True)
                    self._stream.synchronize()
            return self._host.tolist()

    def close(self) -> None:
        """Let go of the engine."""
        self._engine = None

    def stats(self, last_stream: int | None) -> dict[str, Any]:
        """The entries of ``Fleet.stats()`` that kernels count; ``None`` for those that they were told not to."""
        words, at, world = self.read(last_stream), self._geometry.counts, self._geometry.world_size
        always = {"steps": words[CONTROL.launches] // self._programs, "bad_ids": words[CONTROL.bad_ids]}
        if not self._counting:
            return {**always, **dict.fromkeys(COUNTED)}
        taken, given = words[at.got : at.got + world], words[at.sent : at.sent + world]
        return {
            **always,
            "tokens": words[at.tokens],
            "tokens_per_expert": words[at.experts : at.end],
            "rows_received": taken,
            "rows_sent": given,
            "bytes_received": row_bytes(self._geometry.rows, there=taken, back=given),
            "bytes_sent": row_bytes(self._geometry.rows, there=given, back=taken),
            "waited_s": [ns / 1e9 for ns in words[at.waited : at.waited + world]],
        }


COUNTED = (
    "tokens",
    "tokens_per_expert",
    "rows_received",
    "rows_sent",
    "bytes_received",
    "bytes_sent",
    "waited_s",
)
