"""Rows counted per expert, at once or when asked."""

from __future__ import annotations

import threading

import numpy as np

from moefleet.substrate import tally
from moefleet.substrate.routes import Arrivals, arrivals, expert_blocks

L = 3
TABLE = np.array([0, 1, 2, -1, -1])  # experts 0 to 2 are here, 3 is not; the last entry is for id -1


def arrived(ids: list[list[int]]) -> Arrivals:
    flat = np.array(ids, np.int32).reshape(-1)
    return arrivals([flat], [np.ones(flat.size, np.float32)], 2, TABLE)


STEP = [[0, 1], [0, 3], [2, -1], [3, 3], [1, 1]]


def test_slots_are_counted() -> None:
    rows = tally.ExpertTally(L)
    assert rows.tolist() == [0, 0, 0]
    for _ in range(3):
        rows.add(arrived(STEP), None)
    assert rows.tolist() == [6, 9, 3]
    assert rows.tolist() == [6, 9, 3], "asking changes nothing"


def test_blocks_count_an_expert_that_is_named_twice_once() -> None:
    got, rows = arrived(STEP), tally.ExpertTally(L)
    rows.add(got, expert_blocks(got.local, got.weights, L, 8))
    assert rows.tolist() == [2, 2, 1]


def test_few_arrays_are_kept() -> None:
    rows = tally.ExpertTally(L)
    for _ in range(2 * tally._KEPT_SLOTS):
        rows.add(arrived([[0, 1]]), None)
    assert sum(part.size for part in rows._kept) < tally._KEPT_SLOTS
    assert rows.tolist() == [2 * tally._KEPT_SLOTS, 2 * tally._KEPT_SLOTS, 0]


def test_a_rank_without_experts() -> None:
    rows = tally.ExpertTally(0)
    rows.add(arrivals([np.array([0, 1], np.int32)], [np.ones(2, np.float32)], 2, np.full(5, -1)), None)
    assert rows.tolist() == []


def test_another_thread_may_read() -> None:
    rows, got, done, seen = tally.ExpertTally(L), arrived([[0, 1]]), threading.Event(), [0]

    def read() -> None:
        while not done.is_set():
            seen.append(rows.tolist()[0])

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        rows.add(got, None)
    done.set()
    reader.join()
    assert rows.tolist() == [20_000, 20_000, 0]
    assert seen == sorted(seen), "counts never go back"
