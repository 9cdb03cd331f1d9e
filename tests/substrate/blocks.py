"""Control blocks in plain memory, with ranks as threads of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moefleet.substrate.control import BLOCK_BYTES
from moefleet.substrate.faults import FaultState
from moefleet.substrate.waiting import Waiter

HANG_S = 20.0


def waiters(world: int, *, timeout_s: float = HANG_S, spin_s: float = 0.0, tolerant: bool = False) -> list[Waiter]:
    """One for each rank, over the same memory."""
    memory = (ctypes.c_char * (world * BLOCK_BYTES + 64))()
    shift = -ctypes.addressof(memory) % 64
    words = memoryview(memory).cast("B")[shift : shift + world * BLOCK_BYTES].cast("Q")
    blocks = [rank * BLOCK_BYTES // 8 for rank in range(world)]
    address = ctypes.addressof(memory) + shift
    made = []
    for rank in range(world):
        faults = FaultState(rank, world, tolerant=tolerant)
        made.append(Waiter(words, address, blocks, rank, spin_s, timeout_s, faults))
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, run side by side."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))
