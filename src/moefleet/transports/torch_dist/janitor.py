"""Goes on with the rounds for a rank that has given a step up and may not call again for long."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from .bus import Bus

_SHORTEST_S, _LONGEST_S = 0.001, 0.02
_LAST_S = 1.0  # how long a rank that has left may still go on with rounds


class Janitor:
    """Short-lived threads. They poll, so that the end of the process finds none of them in a library call.

    Args:
        patience_s: after which one stops waiting for peers that do not come.
    """

    def __init__(self, bus: Bus, patience_s: float) -> None:
        self._bus, self._patience_s = bus, patience_s
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._looking = False
        self._stop, self._threads = threading.Event(), list[threading.Thread]()
        weakref.finalize(self, _end, self._stop, self._threads)  # at the latest when the process ends

    def look(self) -> None:
        """Start if there is something to do."""
        with self._lock:
            if not self._looking and self._bus.owes():
                self._looking = True
                self._start(self._look)

    def finish(self, close: Callable[[bool], None], anybody_gone: Callable[[], bool]) -> None:
        """Let what was posted get out, then call ``close(clean)``; ``clean``: whether no collective is under way.

        One that waits for a rank that has left or ended never ends, and on a GPU holds up what waits for the GPU as a
        whole. So it is given up soon after ``anybody_gone()``, which is to be True on GPUs alone, or once the group is
        broken. Elsewhere what was posted has until the patience is over: others may come late.
        """
        self._bus.advance()
        if self._is_quiet():
            close(True)
        else:
            self._start(lambda: self._finish(close, anybody_gone))

    def _look(self) -> None:
        def enough() -> bool:
            with self._lock:
                self._looking = self._bus.owes()
                return not self._looking

        self._serve_until(enough)
        self._looking = False

    def _finish(self, close: Callable[[bool], None], anybody_gone: Callable[[], bool]) -> None:
        # Rounds go on in another thread: taking or freeing memory may wait for what only close() ends, in any thread.
        quiet = threading.Event()

        def serve() -> None:
            if self._serve_until(self._is_quiet):
                quiet.set()

        with suppress(RuntimeError):  # no thread can be had
            self._start(serve)
        left, hopeless = self._patience_s, False
        while not (hopeless or quiet.is_set() or self._stop.is_set()) and left > 0:
            hopeless = self._bus.error is not None or anybody_gone()
            self._pause_until(quiet.is_set, min(_LAST_S, left))
            left -= _LAST_S
        if not self._stop.is_set():
            close(quiet.is_set())

    def _is_quiet(self) -> bool:
        return not self._bus.owes() and self._bus.idle()

    def _serve_until(self, enough: Callable[[], bool]) -> bool:
        return self._pause_until(enough, self._patience_s, lambda: self._bus.advance(serve=True))

    def _pause_until(self, enough: Callable[[], bool], seconds: float, work: Callable[[], None] | None = None) -> bool:
        """Whether it is enough, after this long at most; ``work`` is done between pauses."""
        # By its own pauses: a process that is itself stopped for a while does not hold that against its peers.
        spent, pause = 0.0, _SHORTEST_S
        while not (done := enough()) and spent < seconds and not self._stop.wait(pause):
            if work is not None:
                work()
            spent, pause = spent + pause, min(pause * 1.2, _LONGEST_S)
        return done

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="moefleet-janitor", daemon=True)
        with self._starting:
            thread.start()
            self._threads[:] = [each for each in self._threads if each.is_alive()] + [thread]


def _end(stop: threading.Event, threads: list[threading.Thread]) -> None:
    """Waits for no peer: the threads only poll."""
    stop.set()
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(1.0)
