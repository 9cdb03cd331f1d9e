"""Rows that each local expert computed, counted at nearly no cost to a step."""

from __future__ import annotations

import threading

import numpy as np

from .routes import Arrivals, ExpertBlocks, Ints

_KEPT_SLOTS = 1 << 13  # slots whose counting is put off: one count for many small steps, and little memory kept


class ExpertTally:
    """Counts since construction, of ``L`` experts. One thread adds, any thread may read."""

    def __init__(self, num_local: int) -> None:
        self._rows = np.zeros(num_local, np.int64)
        self._kept: list[Ints] = []
        self._slots = 0
        self._counting = threading.Lock()

    def add(self, got: Arrivals, blocks: ExpertBlocks | None) -> None:
        """A step's arrivals, as ``blocks`` sorted them in EXPERT_MAJOR; elsewhere each slot that is here is a row."""
        if blocks is not None:
            self._rows += blocks.counts
            return
        self._kept.append(got.local)
        self._slots += got.local.size
        if self._slots >= _KEPT_SLOTS:
            self._slots = 0
            self._count()

    def tolist(self) -> list[int]:
        """``[L]`` rows of each expert."""
        self._count()
        return self._rows.tolist()

    def _count(self) -> None:
        with self._counting:
            kept = self._kept[:]  # another thread may append meanwhile
            if kept:
                local = np.concatenate([part.reshape(-1) for part in kept])
                self._rows += np.bincount(local + 1, minlength=len(self._rows) + 1)[1:]
                del self._kept[: len(kept)]
