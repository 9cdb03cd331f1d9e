"""A clock that runs only while its reader does: a process that was stopped does not blame the time on others."""

from __future__ import annotations

import time

TICK_S = 0.05
"""How long whoever uses a :class:`RunningClock` sleeps at most between two readings, in seconds."""
MOST_S = 2 * TICK_S
"""Most that the clock advances between two readings; the rest of a longer gap does not count."""


class RunningClock:
    """Seconds since construction, without the gaps in which nobody could have read it."""

    def __init__(self) -> None:
        self._read_at, self._ran_s = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        self._ran_s += min(now - self._read_at, MOST_S)
        self._read_at = now
        return self._ran_s
