"""Sleeping on a word and being woken; and what a machine must have for it."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from moefleet import MoEEpArchError
from moefleet.substrate import futex
from moefleet.substrate.futex import fence, full_fence, futex_wait, futex_wake


@pytest.fixture
def word() -> ctypes.c_uint64:
    return ctypes.c_uint64(5)


def test_a_sleeper_is_woken(word: ctypes.c_uint64) -> None:
    """All of them, from the value that they know."""
    awake = []

    def sleep() -> None:
        while word.value == 5:
            futex_wait(ctypes.addressof(word), 5, 20.0)
        awake.append(word.value)

    sleepers = [threading.Thread(target=sleep) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    time.sleep(0.05)
    assert awake == []
    word.value = 6
    futex_wake(ctypes.addressof(word))
    for sleeper in sleepers:
        sleeper.join(10)
    assert awake == [6, 6, 6]


def test_another_value_is_no_reason_to_sleep(word: ctypes.c_uint64) -> None:
    futex_wait(ctypes.addressof(word), 4, 1000.0)


def test_the_low_half_is_what_is_compared(word: ctypes.c_uint64) -> None:
    word.value = (1 << 32) + 7
    futex_wait(ctypes.addressof(word), 8, 1000.0)
    futex_wait(ctypes.addressof(word), (1 << 33) + 7, 0.01)  # equal in the low half: sleeps


def test_a_sleep_ends_by_itself(word: ctypes.c_uint64) -> None:
    start = time.monotonic()
    futex_wait(ctypes.addressof(word), 5, 0.05)
    assert time.monotonic() - start >= 0.04
    futex_wait(ctypes.addressof(word), 5, 0.0)


def test_waking_nobody_is_fine(word: ctypes.c_uint64) -> None:
    futex_wake(ctypes.addressof(word))
    fence(), full_fence()


def test_a_machine_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert futex.unsupported_reason() == ""
    futex.require_supported()
    monkeypatch.setattr(futex, "_NUMBERS", {})
    monkeypatch.setattr(futex, "_MACHINE", "s390x")
    assert futex.unsupported_reason() == "needs x86-64 or arm64, this is s390x"
    monkeypatch.setattr(futex.sys, "platform", "darwin")
    with pytest.raises(MoEEpArchError, match="shared memory transport: needs Linux with memfd_create, this is darwin"):
        futex.require_supported()
