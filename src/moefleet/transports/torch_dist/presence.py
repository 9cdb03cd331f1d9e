"""What can be said of the other ranks when a collective does not end: it names nobody.

Nothing here decides anything; it finds names for errors. Processes of this host are looked at, and ranks that wait for
long, or leave, say so in the store. A store that does not answer makes errors vaguer, and holds nobody up.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")

_STORE_S = 0.5  # longest wait for the store
WAITS, STOPPED, ENDED, LEFT = "waits there too", "its process is stopped", "its process has ended", "it has left"


def identity() -> dict[str, Any]:
    """This process, for its peers: JSON values."""
    return {"host": _host(), "pid": os.getpid(), "born": _process(os.getpid())[1]}


class Presence:
    """Args: store: of this Fleet's own; people: every rank's :func:`identity`."""

    def __init__(self, store: Any, rank: int, people: list[dict[str, Any]]) -> None:
        self._store, self._rank, self._people = store, rank, people
        self._host = _host()

    def say_waiting(self, round_: int) -> None:
        """Let the others know that this rank waits in this round."""
        _bounded(lambda: self._store.set(f"waits/{self._rank}", str(round_)), None, seconds=0)

    def say_left(self) -> None:
        """Let the others know that this rank is no longer here."""
        _bounded(lambda: self._store.set(f"left/{self._rank}", str(self._store.add("departures", 1))), None)

    def left(self) -> dict[int, int]:
        """Ranks that said they left, and how many had left then, themselves included."""
        nobody: dict[int, int] = {}
        return _bounded(lambda: self._numbers("left"), nobody)

    def others(self, round_: int) -> dict[int, str]:
        """For every other rank what is known of it, in words; empty where nothing is."""
        nobody: dict[int, int] = {}
        waits = _bounded(lambda: self._numbers("waits"), nobody)
        return self._known(self.left(), [peer for peer, number in waits.items() if number >= round_])

    def find_gone(self, seconds: float) -> dict[int, str]:
        """Ranks that ended or left, after something broke, the one that began it first. Looks until there is one, at
        most this long."""
        end = time.monotonic() + seconds
        while True:
            left = self.left()
            gone = {peer: what for peer, what in self._known(left, []).items() if what in (ENDED, LEFT)}
            if gone or time.monotonic() >= end:
                return dict(sorted(gone.items(), key=lambda each: left.get(each[0], 0)))  # killed, or in that order
            time.sleep(0.02)

    def _known(self, left: Collection[int], waiting: Collection[int]) -> dict[int, str]:
        def of(peer: int) -> str:
            return self._seen(peer) or (LEFT if peer in left else WAITS if peer in waiting else "")

        return {peer: of(peer) for peer in range(len(self._people)) if peer != self._rank}

    def _numbers(self, topic: str) -> dict[int, int]:
        """What the other ranks wrote of this."""
        keys = {peer: f"{topic}/{peer}" for peer in range(len(self._people)) if peer != self._rank}
        return {peer: int(self._store.get(key)) for peer, key in keys.items() if self._store.check([key])}

    def _seen(self, peer: int) -> str:
        """What this host's process table says."""
        person = self._people[peer]
        if not self._host or person["host"] != self._host:
            return ""
        state, born = _process(person["pid"])
        if born != person["born"] or state in "ZX":
            return ENDED
        return STOPPED if state in "Tt" else ""


def _host() -> str:
    """What two processes share if they see each other's process ids; empty where it cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as text:
            return f"{text.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; ``("X", "")`` if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as text:
            fields = text.read().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def _bounded(call: Callable[[], T], default: T, seconds: float = _STORE_S) -> T:
    """What ``call`` returns, or the default if it fails or takes longer. It runs in a thread of its own."""
    got: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            got.append(call())

    thread = threading.Thread(target=run, name="moefleet-presence", daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else default
