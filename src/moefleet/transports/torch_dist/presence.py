"""What can be said of the other ranks when a collective does not end: it names nobody.

Nothing here decides anything; it finds names for errors. Processes of this host are looked at, and ranks that wait for
long, or leave, say so in the store. A store that does not answer makes errors vaguer, and holds nobody up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from ...fleet.witness import ENDED, seen

T = TypeVar("T")

_STORE_S = 0.5  # longest wait for the store
_ASK_S = 2.0  # the same where an error is about to name ranks: a busy store would have it name too many
WAITS, LEFT = "waits there too", "it has left"


class Presence:
    """Args: store: of this Fleet's own; people: every rank's :func:`identity`."""

    def __init__(self, store: Any, rank: int, people: list[dict[str, Any]]) -> None:
        self._store, self._rank, self._people = store, rank, people

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
        waits = _bounded(lambda: self._numbers("waits"), nobody, _ASK_S)
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
            return seen(self._people[peer]) or (LEFT if peer in left else WAITS if peer in waiting else "")

        return {peer: of(peer) for peer in range(len(self._people)) if peer != self._rank}

    def _numbers(self, topic: str) -> dict[int, int]:
        """What the other ranks wrote of this."""
        keys = {peer: f"{topic}/{peer}" for peer in range(len(self._people)) if peer != self._rank}
        return {peer: int(self._store.get(key)) for peer, key in keys.items() if self._store.check([key])}


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
