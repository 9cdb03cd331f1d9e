"""Time that passes while nobody looks does not count."""

from __future__ import annotations

import pytest

from moefleet.fleet.agreement import clock
from moefleet.fleet.agreement.clock import MOST_S, RunningClock


def test_a_gap_counts_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    running = RunningClock()
    now += MOST_S / 2
    assert running() == pytest.approx(MOST_S / 2)
    now += 3600
    assert running() == pytest.approx(1.5 * MOST_S)
