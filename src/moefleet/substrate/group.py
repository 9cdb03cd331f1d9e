"""The ranks of one host that share memory: built together, signalled through flags, left in an orderly way."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .control import MAGIC, State, Word
from .faults import FaultState
from .futex import fence, full_fence
from .memory import AddressRange, create_segment
from .sockets import DeathWatcher, Mesh
from .waiting import Waiter

SPIN_S, CROWDED_SPIN_S = 2e-3, 100e-6
"""How long a wait looks again and again before it sleeps, where there is a core for each rank and where there is not.
It yields its core at each look, so that a peer that has work runs; what it saves is waking up from an idle core."""

Exchange = Callable[[str, Callable[[], dict[str, Any]]], list[dict[str, Any]]]
"""Publish what a function returns (or the error it raises) to all ranks, and return every rank's, in rank order."""

_STATE, _ROUND, _RUNNING, _DEPARTED = int(Word.STATE), int(Word.ROUND), int(State.RUNNING), int(State.DEPARTED)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class HostGroup:
    """One segment per rank, mapped by all, with a control block at its start.

    Args:
        rank, world_size: this rank in the group.
        size: bytes of each rank's segment, control block included; equal on all ranks.
        align: the distance between two segments in memory divides by this many bytes.
        allocated: bytes of a segment, from the front, that are taken at once; ``None``: all.
        open_from: where the part begins that peers can write; ``None``: there is none.
        exchange: how values reach the other ranks before memory does.
        look: raises where this rank waits for the others in vain.
        incarnation: identity of this process.
        spin_s: how long a wait spins before it sleeps; ``None`` chooses.
        timeout_s: budget of building the group.
        silence_s: budget of one wait for a peer.
        faults: who is accused, and whether a missing peer raises.
        dead: where deaths are noted, one entry for each rank that is set to 1, from another thread; ``None`` makes it.

    Attributes:
        range: all segments; ``memory`` and ``words`` show them as bytes and as 64-bit words.
        blocks: for each rank the index of its control block's first word.
        waiter: flags.
        closed: whether this rank has left.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        size: int,
        align: int,
        exchange: Exchange,
        look: Callable[[], None] = lambda: None,
        incarnation: int,
        spin_s: float | None,
        timeout_s: float,
        silence_s: float,
        faults: FaultState,
        dead: bytearray | npt.NDArray[np.int64] | None = None,
        allocated: int | None = None,
        open_from: int | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        allocated = size if allocated is None else allocated
        mesh = Mesh(rank, world_size, look)
        fds: list[int] = []
        try:

            def allocate() -> dict[str, Any]:
                fds.append(create_segment(allocated, on_this_host=world_size, spare=size - allocated))
                return {"address": mesh.address, "token": mesh.token}

            peers = exchange("segments", allocate)
            mesh.connect([p["address"] for p in peers], [p["token"] for p in peers], timeout_s)
            fds[:] = mesh.exchange_fds(fds[0], timeout_s)
            self.range = AddressRange.map(fds, rank, size, align, open_from)
        except BaseException:
            mesh.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self.closed = False
        self.memory = memoryview(self.range.buffer).cast("B")
        self.words = words = self.range.words()
        self.blocks = blocks = [r * self.range.stride // 8 for r in range(world_size)]
        self._states = [(peer, block + _STATE) for peer, block in enumerate(blocks) if peer != rank]
        if spin_s is None:
            spin_s = SPIN_S if cores() >= world_size else CROWDED_SPIN_S
        self.waiter = Waiter(words, self.range.address, blocks, rank, spin_s, silence_s, faults, dead)
        self.waiter.publish(Word.MAGIC, MAGIC)
        self.waiter.publish(Word.INCARNATION, incarnation)
        self.waiter.publish(Word.STATE, State.RUNNING)
        watcher = DeathWatcher(mesh, _note_death(self.waiter))
        # Runs at destroy, when the group is collected, or at interpreter exit, whichever is first.
        self._depart = weakref.finalize(self, _depart, self.waiter, rank, mesh, watcher)
        try:
            self.range.use_huge_pages(rank, allocated)
            exchange("ready", dict)
            for peer in range(world_size):
                self.range.use_huge_pages(peer, allocated)
        except BaseException:
            self._depart()
            raise

    def gone(self) -> list[int]:
        """Peers whose process has ended, or that have left: proven, not guessed."""
        words, dead = self.words, self.waiter.dead
        return [peer for peer, state in self._states if dead[peer] or words[state] == _DEPARTED]

    def decided(self, adopted: int) -> bool:
        """Whether a peer runs steps under a later decision than ``adopted``."""
        words = self.words
        return any(words[state] == _RUNNING and words[state + _ROUND - _STATE] > adopted for _, state in self._states)

    def enter_round(self, number: int) -> None:
        """Say that this rank takes part in making decision ``number``: peers stop waiting for it in a step."""
        if self.closed:
            return
        self.waiter.publish(Word.ROUND, number)
        fence()  # who sees the state sees the number too
        self.waiter.publish(Word.STATE, State.IN_ROUND)
        full_fence()
        self.waiter.wake_sleepers()

    def leave_round(self, adopted: int) -> None:
        """Say that this rank is back, with the decision that it has adopted."""
        if self.closed:
            return
        self.waiter.publish(Word.STATE, State.RUNNING)
        fence()
        self.waiter.publish(Word.ROUND, adopted)

    def close(self) -> None:
        """Say DEPARTED and let go. Idempotent, waits for nobody; memory stays mapped while tensors view it."""
        self.closed = True
        self._depart()


def _note_death(waiter: Waiter) -> Callable[[int], None]:
    def note(peer: int) -> None:
        waiter.dead[peer] = 1
        full_fence()
        waiter.wake_sleepers()

    return note


def _depart(waiter: Waiter, rank: int, mesh: Mesh, watcher: DeathWatcher) -> None:
    fence()  # who sees that it left sees all that it committed
    waiter.publish(Word.STATE, State.DEPARTED)
    full_fence()
    waiter.wake_sleepers()
    watcher.close()
    mesh.close()
