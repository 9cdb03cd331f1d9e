"""The ranks of one host that share memory: built together, signalled through flags, left in an orderly way."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from .control import MAGIC, Operation, State, Word
from .faults import FaultState
from .memory import AddressRange, create_segment
from .sockets import DeathWatcher, Mesh
from .waiting import Waiter

Exchange = Callable[[str, Callable[[], dict[str, Any]]], list[dict[str, Any]]]
"""Publish what a function returns (or the error it raises) to all ranks, and return every rank's, in rank order."""


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class HostGroup:
    """One segment per rank, mapped by all, with a control block at its start.

    Args:
        rank, world_size: this rank in the group.
        size: bytes of each rank's segment, control block included; equal on all ranks.
        align: the distance between two segments in memory divides by this many bytes.
        exchange: how values reach the other ranks before memory does.
        incarnation: identity of this process.
        spin_s: how long a wait spins before it sleeps; ``None`` chooses.
        timeout_s: budget of building the group.
        silence_s: budget of one wait for a peer.
        faults: who is accused, and whether a missing peer raises.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        size: int,
        align: int,
        exchange: Exchange,
        incarnation: int,
        spin_s: float | None,
        timeout_s: float,
        silence_s: float,
        faults: FaultState,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        mesh = Mesh(rank, world_size)
        fds: list[int] = []
        try:

            def allocate() -> dict[str, Any]:
                fds.append(create_segment(size, on_this_host=world_size))
                return {"address": mesh.address, "token": mesh.token}

            peers = exchange("segments", allocate)
            mesh.connect([p["address"] for p in peers], [p["token"] for p in peers], timeout_s)
            fds[:] = mesh.exchange_fds(fds[0], timeout_s)
            self.range = AddressRange.map(fds, rank, size, align)
        except BaseException:
            mesh.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        words = self.range.words()
        blocks = [r * self.range.stride // 8 for r in range(world_size)]
        if spin_s is None:
            spin_s = 50e-6 if cores() >= world_size else 0.0
        self.waiter = Waiter(words, self.range.address, blocks, rank, spin_s, silence_s, faults)
        self.waiter.publish(Word.MAGIC, MAGIC)
        self.waiter.publish(Word.INCARNATION, incarnation)
        self.waiter.publish(Word.STATE, State.RUNNING)
        watcher = DeathWatcher(mesh, _note_death(self.waiter))
        # Runs at destroy, when the group is collected, or at interpreter exit, whichever is first.
        self._depart = weakref.finalize(self, _depart, self.waiter, rank, mesh, watcher)
        try:
            exchange("ready", dict)
        except BaseException:
            self._depart()
            raise

    @property
    def memory(self) -> memoryview:
        """All segments as bytes, ``range.stride`` apart."""
        return memoryview(self.range.buffer).cast("B")

    def commit(self, operation: Operation, step: int) -> None:
        self.waiter.commit(operation, step)

    def close(self) -> None:
        """Say DEPARTED and let go. Idempotent, waits for nobody; memory stays mapped while tensors view it."""
        self._depart()

    @property
    def closed(self) -> bool:
        return not self._depart.alive


def _note_death(waiter: Waiter) -> Callable[[int], None]:
    def note(peer: int) -> None:
        waiter.dead[peer] = 1
        waiter.wake_sleepers()

    return note


def _depart(waiter: Waiter, rank: int, mesh: Mesh, watcher: DeathWatcher) -> None:
    waiter.publish(Word.STATE, State.DEPARTED)
    waiter.wake_sleepers()
    watcher.close()
    mesh.close()
