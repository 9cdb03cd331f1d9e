"""Hundreds of steps and dozens of Fleets: memory, descriptors and threads stay where they were."""

from __future__ import annotations

from typing import Any

import pytest

from moefleet import BootstrapConfig, EpLayout
from tests.conformance.pool import shared_pool
from tests.transports.shm.leftovers import grown, of_this_process, resident_bytes
from tests.transports.shm.ranks import fleet_of, step

ROOM = 3 << 20  # allocators keep some
TRIES = 3  # the kernel makes huge pages when it likes; a leak grows each time


def check_flat(fn: Any, *args: Any) -> None:
    """``fn`` returns what there was before, what there is after, and how many steps it ran, if that is known."""
    for _ in range(TRIES):
        more = []
        for result in shared_pool().run(fn, *args, world_size=3, timeout_s=100):
            assert result.error is None, result.error
            (bytes_before, before), (bytes_after, after), steps = result.value
            assert steps in (None, 400)
            assert not grown(before, after)
            more.append(bytes_after - bytes_before)
        if max(more) <= ROOM:
            return
    raise AssertionError(f"each of {TRIES} times the ranks grew by up to {max(more)} bytes")


def many_steps(bootstrap: BootstrapConfig, layout: EpLayout) -> Any:
    with fleet_of(bootstrap, layout) as fleet:
        for seed in range(100):
            step(fleet, seed)
        before = resident_bytes(), of_this_process()
        for seed in range(300):
            step(fleet, seed % 100)
        return before, (resident_bytes(), of_this_process()), fleet.stats()["steps"]


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_memory_stays_flat_over_steps(layout: EpLayout) -> None:
    check_flat(many_steps, layout)


def many_fleets(bootstrap: BootstrapConfig) -> Any:
    def build_and_use(count: int) -> tuple[int, dict[str, int]]:
        for seed in range(count):
            with fleet_of(bootstrap, list(EpLayout)[seed % 3]) as fleet:
                step(fleet, seed)
        del fleet
        return resident_bytes(), of_this_process()

    return build_and_use(12), build_and_use(36), None


def test_memory_stays_flat_over_fleets() -> None:
    check_flat(many_fleets)
