"""What is left of pytest's time limit for the running test: ranks that hang are to tell where before it is over."""

from __future__ import annotations

import math
import time

_over_at = math.inf


def begin(limit_s: float | None) -> None:
    """A test starts now and may take so long; ``None`` or 0: as long as it likes."""
    global _over_at
    _over_at = time.monotonic() + limit_s if limit_s else math.inf


def left_s() -> float:
    """Seconds until pytest ends the running test."""
    return _over_at - time.monotonic()
