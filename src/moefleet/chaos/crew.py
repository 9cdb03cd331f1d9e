"""The ranks of one round as the supervisor sees them: where each stands, what it reported, and what it is told."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import MoEEpError
from ..launch.nursery import Forked, Nursery
from ..launch.process import wait_until_started

Event = dict[str, Any]
START_S = 120.0


@dataclass
class Member:
    """One process.

    Attributes:
        idle: it waits for orders.
        stopped: by SIGSTOP, from here.
        gone: its socket has closed.
        step, epoch, generation, evicted, segments: as it last reported.
    """

    rank: int
    process: Forked
    link: socket.socket
    generation: int
    idle: bool = False
    stopped: bool = False
    gone: bool = False
    step: int = 0
    epoch: int = 0
    evicted: bool = False
    segments: int = 0
    unread: bytes = b""

    def order(self, order: str, **more: Any) -> None:
        self.idle = False
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps({"order": order, **more}).encode() + b"\n")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    @property
    def present(self) -> bool:
        """Running, as far as is known."""
        return not self.gone and not self.stopped


class Crew:
    """All processes of a round.

    Args:
        see: called with every event, as it arrives.
    """

    def __init__(self, nursery: Nursery, spec: dict[str, Any], see: Callable[[Event], None]) -> None:
        self._nursery, self._spec, self._see = nursery, spec, see
        self.members: list[Member] = []

    def start(self, rank: int, world: int, generation: int) -> Member:
        """A new process that is to be ``rank``."""
        spec = self._spec | {"world": world, "generation": generation}
        process, link = fork_rank(self._nursery)
        member = Member(rank, process, link, generation)
        member.order("be", rank=rank, spec=spec)
        self.members.append(member)
        return member

    def at(self, rank: int) -> Member:
        """The latest process of a rank."""
        return next(member for member in reversed(self.members) if member.rank == rank)

    def present(self) -> Iterator[Member]:
        return (member for member in self.members if member.present)

    def poll(self, timeout_s: float) -> None:
        """Read what has arrived; wait for it no longer than this."""
        open_ = {member.link.fileno(): member for member in self.members if not member.gone}
        poll = select.poll()
        for fd in open_:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(1000 * max(timeout_s, 0.0)):
            self._read(open_[fd])

    def _read(self, member: Member) -> None:
        try:
            data = member.link.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            member.gone, member.stopped = True, False
            member.link.close()
            self._see({"kind": "gone", "rank": member.rank, "t": time.monotonic(), "generation": member.generation})
            return
        *lines, member.unread = (member.unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self._note(member, event)
            self._see(event)

    def _note(self, member: Member, event: Event) -> None:
        kind = event["kind"]
        member.generation = event["generation"]
        member.step = event.get("step", member.step)
        if kind in ("joined", "idle"):
            member.idle = True
            member.evicted, member.segments = event["evicted"], event["segments"]
        if kind in ("joined", "idle", "agreed", "readmitted"):
            member.epoch = event["epoch"]
        if kind == "moved":
            member.step, member.epoch = 0, 0

    def end(self, grace_s: float) -> tuple[int, int]:
        """End whoever is left. How many would not go by themselves, and how many not even then."""
        for member in self.members:
            if member.stopped:
                member.signal(signal.SIGCONT)
        stubborn = self._wait_for_ends(grace_s)
        for member in stubborn:
            member.signal(signal.SIGKILL)
        leaked = self._wait_for_ends(10.0)
        for member in self.members:
            member.link.close()
        return len(stubborn), len(leaked)

    def _wait_for_ends(self, seconds: float) -> list[Member]:
        until = time.monotonic() + seconds
        while True:
            left = [member for member in self.members if member.process.poll() is None]
            if not left or time.monotonic() > until:
                return left
            self.poll(0.0)
            time.sleep(0.002)


def warm_nursery(life: str = "moefleet.chaos.rank") -> Nursery:
    """One that can fork ranks which live as this module's ``serve`` says, each with one thread. Close it in the end.

    Raises:
        MoEEpError: there can be none here.
    """
    nursery = Nursery(1, life, TORCH_CPP_LOG_LEVEL="ERROR")
    try:
        wait_until_started([nursery], START_S, time.monotonic() + START_S)
        if not nursery.can_fork():
            raise MoEEpError("ranks cannot be forked: something starts threads or opens a GPU in each new Python here")
    except BaseException:
        nursery.close()
        raise
    return nursery


def fork_rank(nursery: Nursery) -> tuple[Forked, socket.socket]:
    """A new process, which prints where this one does, and the socket to it."""
    link, theirs = socket.socketpair()
    with theirs:
        return nursery.fork(theirs.fileno(), 1, 2, 2), link
