"""The flags of a healthy step in C: what they write is what Python reads; they give way where anything is unusual."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass

import pytest

from moefleet import native
from moefleet.native import FleetStruct
from moefleet.substrate.control import Header, Operation, Word, as_bits, flag_word
from moefleet.substrate.faults import FaultState
from moefleet.substrate.futex import futex_wait
from moefleet.substrate.waiting import Waiter
from moefleet.transports.shm.layout import SegmentLayout
from moefleet.transports.shm.quick import QuickFlags
from tests.native.needs import needs_the_helper

pytestmark = needs_the_helper

DISPATCH, COMBINE = Operation.DISPATCH, Operation.COMBINE
SEGMENT = 1 << 13
W, GENERATION = 3, 7


@dataclass
class Rank:
    quick: QuickFlags
    waiter: Waiter
    faults: FaultState
    struct: FleetStruct


@pytest.fixture
def memory() -> memoryview:
    """All segments, of which only the front is used."""
    return memoryview((ctypes.c_uint64 * (W * SEGMENT // 8))()).cast("B")


@pytest.fixture
def ranks(memory: memoryview) -> list[Rank]:
    library, words = native.library(), memory.cast("Q")
    assert library is not None
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    blocks, made = [rank * SEGMENT // 8 for rank in range(W)], []
    for rank in range(W):
        faults = FaultState(rank, W)
        waiter = Waiter(words, base, blocks, rank, 0.05, 20.0, faults)
        struct = FleetStruct(base=base, stride=SEGMENT, rank=rank, world=W)
        made.append(Rank(QuickFlags(library, struct, waiter, faults, GENERATION, early=True), waiter, faults, struct))
    return made


def collected(rank: Rank, operation: Operation, step: int, taking: int) -> list[int] | None:
    return list(rank.quick.tokens) if rank.quick.collect(operation, step, taking) else None


def test_a_commit_is_what_python_writes(ranks: list[Rank], memory: memoryview) -> None:
    ranks[1].faults.epoch, ranks[1].faults.accused = 5, 0b100
    ranks[1].quick.commit(COMBINE, 9, tokens=11, topk=3, dtype=2, placed=True)
    at = SEGMENT + SegmentLayout.header(COMBINE, 9)
    header = Header(GENERATION, 5, 9, COMBINE, 11, 3, 2, mask=0b011, placed=True)
    assert Header.read(memory, at) == header
    plain = bytearray(SEGMENT)
    header.write(memoryview(plain), 0)
    assert bytes(memory[at : at + 200]) == bytes(plain[:200])
    assert ranks[0].waiter.committed(1, COMBINE, 9) and not ranks[0].waiter.committed(1, DISPATCH, 9)


def test_all_came(ranks: list[Rank]) -> None:
    for number, rank in enumerate(ranks):
        rank.quick.commit(DISPATCH, 2, tokens=10 + number, topk=3, dtype=2, placed=False)
    assert collected(ranks[1], DISPATCH, 2, 0b111) == [10, 11, 12]
    assert collected(ranks[1], DISPATCH, 2, 0b110) == [0, 11, 12]
    assert ranks[1].waiter.waited_s.tolist() == [0.0] * W, "nobody was waited for"


def test_who_is_late_is_waited_for_a_little(ranks: list[Rank]) -> None:
    for rank in ranks[:2]:
        rank.quick.commit(DISPATCH, 1, tokens=1, topk=3, dtype=2, placed=False)
    ranks[0].struct.spin_s = 0.01
    assert collected(ranks[0], DISPATCH, 1, 0b111) is None
    assert ranks[0].waiter.waited_s[2] >= 0.01 and ranks[0].waiter.waited_s[1] == 0
    ranks[0].struct.spin_s = 20.0

    def come() -> None:
        time.sleep(0.05)
        ranks[2].quick.commit(DISPATCH, 1, tokens=2, topk=3, dtype=2, placed=False)

    thread = threading.Thread(target=come)
    thread.start()
    assert collected(ranks[0], DISPATCH, 1, 0b111) == [1, 1, 2], "ctypes lets the other thread run"
    thread.join()


@pytest.mark.parametrize(
    "change", [{"topk": 4}, {"dtype": 3}, {"epoch": 1}, {"accused": 0b001}, {"generation": 8}], ids=str
)
def test_whoever_differs_is_left_to_python(ranks: list[Rank], change: dict[str, int]) -> None:
    ranks[0].quick.commit(DISPATCH, 1, tokens=1, topk=3, dtype=2, placed=False)
    ranks[1].quick.commit(DISPATCH, 1, tokens=1, topk=3, dtype=2, placed=False)
    ranks[2].struct.generation = change.get("generation", GENERATION)
    ranks[2].faults.epoch, ranks[2].faults.accused = change.get("epoch", 0), change.get("accused", 0)
    ranks[2].quick.commit(DISPATCH, 1, tokens=1, topk=change.get("topk", 3), dtype=change.get("dtype", 2), placed=False)
    assert collected(ranks[0], DISPATCH, 1, 0b111) is None
    assert collected(ranks[0], DISPATCH, 1, 0b011) == [1, 1, 0]


def test_who_began_first_on_a_core_goes_first(ranks: list[Rank]) -> None:
    library, step = native.library(), 4
    assert library is not None

    def before(rank: Rank, taking: int) -> int:
        return library.moefleet_give_way(ctypes.addressof(rank.struct), step, as_bits(taking))

    for rank, began in zip(ranks, (20, 30, 10)):
        rank.waiter.publish(Word.CORE, 5)
        rank.waiter.publish(Word.BEGAN, began)
        rank.struct.crowded = 1
    assert [before(rank, 0b111) for rank in ranks] == [1, 2, 0]
    assert before(ranks[1], 0b011) == 1, "the other takes no part"
    ranks[0].waiter.publish(Word.CORE, 6)
    assert [before(rank, 0b111) for rank in ranks] == [0, 1, 0]
    ranks[2].waiter.mark(Operation.CLOSED, step)
    assert before(ranks[1], 0b111) == 0, "the other is done"
    ranks[0].waiter.publish(Word.CORE, 5)
    ranks[1].struct.crowded = 0
    assert before(ranks[1], 0b111) == 0, "each has a core"


def test_a_rank_says_where_it_commits(ranks: list[Rank], memory: memoryview) -> None:
    ranks[1].waiter.publish(Word.CORE, 1 << 40)
    ranks[1].quick.commit(COMBINE, 9, tokens=11, topk=3, dtype=2, placed=True)
    assert memory.cast("Q")[SEGMENT // 8 + Word.CORE] in os.sched_getaffinity(0)


def test_a_step_that_somebody_gave_up_is_left_to_python(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.quick.commit(DISPATCH, 3, tokens=1, topk=3, dtype=2, placed=False)
    ranks[2].waiter.publish(Word.FAILED + 1, 4 * 3 + COMBINE)
    assert collected(ranks[0], DISPATCH, 3, 0b111) == [1, 1, 1], "dispatch went well"
    for rank in ranks:
        rank.quick.commit(COMBINE, 3, tokens=1, topk=0, dtype=2, placed=False)
    assert collected(ranks[0], COMBINE, 3, 0b111) is None
    assert collected(ranks[0], COMBINE, 3, 0b011) == [1, 1, 0]


def test_routing_can_be_read_while_rows_are_committed(ranks: list[Rank]) -> None:
    """A rank that placed its rows commits them under the header that slower ranks may still be reading."""
    ranks[0].quick.commit(Operation.ROUTES, 1, tokens=77, topk=3, dtype=2, placed=True)
    ranks[1].quick.commit(Operation.ROUTES, 1, tokens=5, topk=3, dtype=2, placed=True)
    done = threading.Event()

    def commit_rows() -> None:
        for _ in range(20000):
            ranks[0].quick.commit(DISPATCH, 1, tokens=77, topk=3, dtype=2, placed=True)
        done.set()

    thread = threading.Thread(target=commit_rows)
    thread.start()
    while not done.is_set():
        assert collected(ranks[1], Operation.ROUTES, 1, 0b011) == [77, 5, 0]
    thread.join()
    assert collected(ranks[1], DISPATCH, 1, 0b001) == [77, 5, 0] and list(ranks[1].quick.placed) == [1, 1, 0]


def sleeper(rank: Rank) -> threading.Event:
    """A rank that sleeps on a flag that nobody sets, so that only a wake-up ends its sleep."""
    entered, woken = threading.Event(), threading.Event()
    address = (rank.struct.base or 0) + SEGMENT + 8 * flag_word(Operation.CLOSED, 1)

    def sleep() -> None:
        entered.set()
        futex_wait(address, 0, 100.0)
        woken.set()

    threading.Thread(target=sleep, daemon=True).start()
    assert entered.wait(20)
    time.sleep(0.05)  # it most likely sleeps by then
    return woken


def say_asleep(rank: Rank) -> None:
    rank.waiter.publish(Word.WAITING_STEP, 1)
    rank.waiter.publish(Word.WAITING_OPERATION, Operation.CLOSED)
    rank.waiter.publish(Word.WAITING_ON, 1 + 1)


@pytest.mark.parametrize("last", [DISPATCH, Operation.ROUTES], ids=["all_rows", "all_routing"])
def test_the_last_wakes_sleepers(ranks: list[Rank], last: Operation) -> None:
    """Fetched rows come with their routing: who brings them may be the last whom others need to place theirs."""
    woken = sleeper(ranks[2])
    for step in range(1, 6):  # once, unless the thread did not sleep yet
        ranks[2].quick.commit(last, step, tokens=1, topk=1, dtype=1, placed=False)
        say_asleep(ranks[2])
        ranks[0].quick.commit(last, step, tokens=1, topk=1, dtype=1, placed=False)
        assert not woken.is_set(), "rank 1 is missing"
        ranks[1].quick.commit(DISPATCH, step, tokens=1, topk=1, dtype=1, placed=False)
        if woken.wait(4.0):
            return
    raise AssertionError("nobody woke it")


def test_who_knows_of_a_missing_rank_does_not_count_on_the_last(ranks: list[Rank]) -> None:
    woken, ranks[0].faults.accused = sleeper(ranks[2]), 0b100
    for step in range(1, 6):
        say_asleep(ranks[2])
        ranks[0].quick.commit(DISPATCH, step, tokens=1, topk=1, dtype=1, placed=False)
        if woken.wait(4.0):
            return
    raise AssertionError("nobody woke it")
