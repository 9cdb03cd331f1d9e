"""Goes on with the rounds for a rank that has given a step up and may not call again for long."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from .bus import Bus

_SHORTEST_S, _LONGEST_S = 0.001, 0.02


class Janitor:
    """Short-lived threads. They poll, so that the end of the process finds none of them in a library call.

    Args:
        patience_s: after which one stops waiting for peers that do not come.
    """

    def __init__(self, bus: Bus, patience_s: float) -> None:
        self._bus, self._patience_s = bus, patience_s
        self._lock = threading.Lock()
        self._looking = False
        self._stop, self._threads = threading.Event(), list[threading.Thread]()
        weakref.finalize(self, _end, self._stop, self._threads)  # at the latest when the process ends

    def look(self) -> None:
        """Start if there is something to do."""
        with self._lock:
            if not self._looking and self._bus.owes():
                self._looking = True
                self._start(self._look)

    def finish(self, close: Callable[[bool], None]) -> None:
        """Let what was posted get out, then call ``close(clean)``; ``clean``: whether no collective is under way."""
        self._bus.advance()
        if self._is_quiet():
            close(True)
        else:
            self._start(lambda: self._finish(close))

    def _look(self) -> None:
        def enough() -> bool:
            with self._lock:
                self._looking = self._bus.owes()
                return not self._looking

        self._serve_until(enough)
        self._looking = False

    def _finish(self, close: Callable[[bool], None]) -> None:
        self._serve_until(self._is_quiet)
        if not self._stop.is_set():
            close(self._bus.idle())

    def _is_quiet(self) -> bool:
        return not self._bus.owes() and self._bus.idle()

    def _serve_until(self, enough: Callable[[], bool]) -> None:
        end, pause = time.monotonic() + self._patience_s, _SHORTEST_S
        while not enough() and time.monotonic() < end and not self._stop.wait(pause):
            self._bus.advance(serve=True)
            pause = min(pause * 1.2, _LONGEST_S)

    def _start(self, work: Callable[[], None]) -> None:
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, name="moefleet-janitor", daemon=True))
        self._threads[-1].start()


def _end(stop: threading.Event, threads: list[threading.Thread]) -> None:
    """Waits for no peer: the threads only poll."""
    stop.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(1.0)
