"""A process group between threads of one process, that refuses what would tear a real one. It is of a kind that the
transport cannot make itself, and so uses as it is."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch


@dataclass
class Collective:
    """The n-th collective of a group: what each rank issued."""

    world_size: int
    issued: dict[int, tuple[torch.Tensor, torch.Tensor, list[int], list[int]]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    torn: str = ""

    def run(self) -> None:
        """Move the bytes, once all ranks have come."""
        for rank, (out, _, out_rows, _) in self.issued.items():
            at = 0
            for peer in range(self.world_size):
                _, theirs, _, rows = self.issued[peer]
                if bool(rows) != bool(out_rows):
                    self.torn = f"rank {rank} has sizes and rank {peer} has none"
                    return
                count = out_rows[peer] if out_rows else len(out) // self.world_size
                sent = rows[rank] if rows else len(theirs) // self.world_size
                first = sum(rows[:rank]) if rows else rank * sent
                if count != sent or (count and out[0].numel() != theirs[0].numel()):
                    self.torn = (
                        f"rank {rank} expects {count} x {out.shape[1:]}, rank {peer} sends {sent} x {theirs.shape[1:]}"
                    )
                    return
                out[at : at + count] = theirs[first : first + count]
                at += count


class FakeWorld:
    """Groups of ``world_size`` threads. ``torn`` lists what would have torn a collective.

    Args:
        limit_s: when a collective gives up by itself.
    """

    def __init__(self, world_size: int, limit_s: float = 1000.0) -> None:
        self.world_size, self.limit_s = world_size, limit_s
        self.lock = threading.Lock()
        self.collectives: list[Collective] = []
        self.torn: list[str] = []

    def group(self, rank: int) -> FakeGroup:
        return FakeGroup(self, rank)


class FakeGroup:
    """One rank's end: as much of a ProcessGroup as the transport uses."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self._world, self._rank, self._issued = world, rank, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.world_size

    def name(self) -> str:
        return "fake"

    def alltoall_base(
        self, out: torch.Tensor, source: torch.Tensor, out_rows: list[int], rows: list[int], options: Any
    ) -> FakeWork:
        world = self._world
        with world.lock:
            if self._issued == len(world.collectives):
                world.collectives.append(Collective(world.world_size))
            collective = world.collectives[self._issued]
            self._issued += 1
            collective.issued[self._rank] = out, source, out_rows, rows
            if len(collective.issued) == world.world_size:
                collective.run()
                if collective.torn:
                    world.torn.append(collective.torn)
                collective.done.set()
        return FakeWork(collective, world.limit_s)


class FakeWork:
    def __init__(self, collective: Collective, limit_s: float) -> None:
        self._collective, self._end = collective, time.monotonic() + limit_s

    def is_completed(self) -> bool:
        return self._collective.done.is_set() or time.monotonic() > self._end

    def wait(self, timeout: timedelta | None = None) -> bool:
        left = max(0.0, self._end - time.monotonic())
        if not self._collective.done.wait(left if timeout is None else min(left, timeout.total_seconds())):
            raise RuntimeError("Timed out waiting for recv" if self.is_completed() else "Operation timed out!")
        if self._collective.torn:
            raise RuntimeError(self._collective.torn)
        return True
