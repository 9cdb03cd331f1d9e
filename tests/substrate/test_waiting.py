"""Waiting for flags: wake-ups, deaths, budgets that count only the waiter's own time, and waits for one another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from moefleet import MoEEpPeerError, MoEEpTimeoutError
from moefleet.substrate import waiting
from moefleet.substrate.control import Operation, State, Word
from moefleet.substrate.waiting import PATIENCE, POLL_S
from tests.substrate.blocks import at_once, waiters

DISPATCH, COMBINE, CLOSED = Operation.DISPATCH, Operation.COMBINE, Operation.CLOSED


# Flags.


def test_a_flag_stands_for_its_own_phase_and_parity_and_all_steps_before() -> None:
    me, peer = waiters(2)
    assert not peer.committed(0, DISPATCH, 2)
    me.commit(DISPATCH, 4)
    assert peer.committed(0, DISPATCH, 4) and peer.committed(0, DISPATCH, 2)
    assert not peer.committed(0, DISPATCH, 6)
    assert not peer.committed(0, DISPATCH, 3), "the other set"
    assert not peer.committed(0, COMBINE, 4)
    assert not me.committed(1, DISPATCH, 4)
    me.mark(CLOSED, 4)
    assert peer.committed(0, CLOSED, 4)


@pytest.mark.parametrize("spin_s", [0.0, 10.0], ids=["asleep", "spinning"])
def test_a_wait_ends_with_the_last_commit(spin_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, looking = waiters(3, spin_s=spin_s), threading.Event()
    order: list[str] = []
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: looking.set())

    def wait() -> list[int]:
        lost = ranks[0].wait([1, 2], DISPATCH, 1)
        order.append("woken")
        return lost

    def commit() -> None:
        while not (looking.is_set() if spin_s else ranks[0].said(0, Word.WAITING_ON)):
            time.sleep(0.001)
        for rank in (0, 1, 2):
            time.sleep(0.02)
            order.append(f"rank {rank} commits")
            ranks[rank].commit(DISPATCH, 1)

    assert at_once(wait, commit) == [[], None]
    assert order == ["rank 0 commits", "rank 1 commits", "rank 2 commits", "woken"]
    assert ranks[0].said(0, Word.WAITING_ON) == 0
    assert ranks[0].waited_s[2] > 0 and ranks[0].waited_s[0] == 0


def test_what_is_committed_already_costs_no_wait() -> None:
    ranks = waiters(3)
    ranks[1].commit(DISPATCH, 3), ranks[2].commit(DISPATCH, 5)
    assert ranks[0].wait([1, 2], DISPATCH, 3) == []
    assert ranks[0].wait([], DISPATCH, 99) == []
    assert ranks[0].waited_s.tolist() == [0.0, 0.0, 0.0]


def test_who_has_looked_long_enough_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: pytest.fail("it looks again"))
    ranks = waiters(2, spin_s=10.0)

    def commit() -> None:
        time.sleep(0.02)
        ranks[1].commit(DISPATCH, 1)

    assert at_once(lambda: ranks[0].wait([1], DISPATCH, 1, spun_s=10.0), commit) == [[], None]


def test_thousands_of_waits_lose_no_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the poll that would hide it: a lost wake-up is a hang."""
    monkeypatch.setattr(waiting, "POLL_S", 1000.0)
    ranks = waiters(3, timeout_s=1000.0)

    def run(me: int) -> Callable[[], int]:
        def steps() -> int:
            for step in range(1, 1001):
                for phase in (DISPATCH, COMBINE):
                    ranks[me].commit(phase, step)
                    ranks[me].wait([rank for rank in range(3) if rank != me], phase, step)
            return step

        return steps

    assert at_once(*(run(rank) for rank in range(3))) == [1000] * 3


# Peers that will not come.


def dies(ranks: list[waiting.Waiter], peer: int) -> None:
    """What the death watcher of rank 0 does."""
    ranks[0].dead[peer] = 1
    ranks[0].wake_sleepers()


def leaves(ranks: list[waiting.Waiter], peer: int) -> None:
    ranks[peer].publish(Word.STATE, State.DEPARTED)
    ranks[peer].wake_sleepers()


@pytest.mark.parametrize("how, told", [(dies, "its process has ended"), (leaves, "it has left")])
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["before", "during"])
def test_a_peer_that_is_gone_is_named(how: Callable, told: str, pause: float) -> None:
    ranks = waiters(3)
    ranks[1].commit(COMBINE, 7)

    def go() -> None:
        time.sleep(pause)
        how(ranks, 2)

    if not pause:
        go()
    error, _ = at_once(lambda: ranks[0].wait([1, 2], COMBINE, 7), go if pause else lambda: None)
    assert isinstance(error, MoEEpPeerError) and error.rank == 2
    assert str(error).startswith("rank 0 waits in combine of step 7 for rank 2: ") and told in str(error)
    assert told in error.reason
    assert ranks[0].said(0, Word.WAITING_ON) == 0


@pytest.mark.parametrize("how", [dies, leaves])
def test_what_a_peer_had_committed_counts(how: Callable) -> None:
    ranks = waiters(2)
    ranks[1].commit(DISPATCH, 1)
    how(ranks, 1)
    assert ranks[0].wait([1], DISPATCH, 1) == []
    with pytest.raises(MoEEpPeerError):
        ranks[0].wait([1], COMBINE, 1)


def test_one_that_is_gone_is_found_while_another_is_merely_slow() -> None:
    ranks = waiters(3)
    dies(ranks, 2)
    with pytest.raises(MoEEpPeerError) as caught:
        ranks[0].wait([1, 2], DISPATCH, 1)
    assert caught.value.rank == 2


@pytest.mark.parametrize("how", [dies, leaves])
def test_with_fault_tolerance_who_is_gone_is_accused_and_left_out(how: Callable) -> None:
    ranks = waiters(3, tolerant=True)
    ranks[1].commit(DISPATCH, 1)
    how(ranks, 2)
    assert ranks[0].wait([1, 2], DISPATCH, 1) == [2]
    assert ranks[0]._faults.accused == 0b100


def test_a_peer_that_gives_the_step_up_ends_the_wait_for_all() -> None:
    """Rank 2 never comes, but what rank 1 has to say is known at once."""
    ranks = waiters(3)

    def give_up() -> None:
        time.sleep(0.05)
        ranks[1].publish(Word.FAILED + 1, 4 * 1 + DISPATCH)
        ranks[1].mark(DISPATCH, 1)
        ranks[1].wake_sleepers()

    assert at_once(lambda: ranks[0].wait([1, 2], DISPATCH, 1), give_up) == [[], None]


def test_who_waits_for_the_end_of_a_failed_step_does_wait() -> None:
    """CLOSED is waited for because the step failed: its failure is no reason not to."""
    ranks = waiters(2)
    ranks[1].publish(Word.FAILED + 1, 4 * 1 + DISPATCH)
    done = threading.Event()

    def close() -> None:
        time.sleep(0.1)
        done.set()
        ranks[1].mark(CLOSED, 1)

    def wait() -> bool:
        ranks[0].wait([1], CLOSED, 1)
        return done.is_set()

    assert at_once(wait, close) == [True, None]


def test_a_failure_of_somebody_who_is_not_waited_for_ends_nothing() -> None:
    ranks = waiters(3)
    ranks[2].publish(Word.FAILED + 1, 4 * 1 + DISPATCH)
    done = threading.Event()

    def commit() -> None:
        time.sleep(0.1)
        done.set()
        ranks[1].commit(DISPATCH, 1)

    def wait() -> bool:
        ranks[0].wait([1], DISPATCH, 1)
        return done.is_set()

    assert at_once(wait, commit) == [True, None]


# Budgets.


class FakeClock:
    """Each sleep takes this long by the clock, and nothing else takes any time."""

    def __init__(self, nap_s: float, during: Callable[[int], None] = lambda naps: None) -> None:
        self.now, self.naps, self.nap_s, self.during = 0.0, 0, nap_s, during

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
        monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(waiting, "futex_wait", self.nap)
        return self

    def nap(self, address: int, expected: int, timeout_s: float) -> None:
        assert 0 <= timeout_s <= POLL_S
        self.naps += 1
        self.now += self.nap_s
        self.during(self.naps)


def test_the_budget_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(POLL_S).install(monkeypatch)
    ranks = waiters(2, timeout_s=1.0)
    ranks[1].publish(Word.STATE, State.RUNNING)
    ranks[1].publish(Word.STEP, 3)
    with pytest.raises(MoEEpTimeoutError) as caught:
        ranks[0].wait([1], DISPATCH, 4)
    assert clock.naps == pytest.approx(1.0 / POLL_S, abs=1)
    assert caught.value.ranks == (1,)
    assert "rank 0 waits in dispatch of step 4 for rank 1: nothing for 1 s" in str(caught.value)
    assert "it last said: RUNNING, step 3" in str(caught.value)
    assert ranks[0].said(0, Word.WAITING_ON) == 0


def test_a_waiter_that_was_stopped_does_not_count_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sleep lasts an hour, as after SIGSTOP and SIGCONT: at most one poll of it counts."""
    clock = FakeClock(3600.0).install(monkeypatch)
    ranks = waiters(2, timeout_s=1.0)
    with pytest.raises(MoEEpTimeoutError):
        ranks[0].wait([1], DISPATCH, 1)
    assert clock.naps == pytest.approx(1.0 / POLL_S, abs=1)


def test_a_peer_that_comes_in_the_last_moment_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = waiters(2, timeout_s=1.0)
    last = int(1.0 / POLL_S)
    FakeClock(POLL_S, lambda naps: ranks[1].commit(DISPATCH, 1) if naps == last else None).install(monkeypatch)
    assert ranks[0].wait([1], DISPATCH, 1) == []


def test_a_peer_that_waits_for_somebody_else_gets_three_budgets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(POLL_S).install(monkeypatch)
    ranks = waiters(3, timeout_s=1.0)
    ranks[1].publish(Word.WAITING_ON, 2 + 1)
    with pytest.raises(MoEEpTimeoutError) as caught:
        ranks[0].wait([1], DISPATCH, 1)
    assert clock.naps == pytest.approx((1 + PATIENCE) * 1.0 / POLL_S, abs=2)
    assert "waiting for rank 2" in str(caught.value)


def test_each_peer_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2, the stalled one, is accused; rank 1, which waits for it, is not."""
    ranks = waiters(3, timeout_s=1.0, tolerant=True)
    ranks[1].publish(Word.WAITING_ON, 2 + 1)
    late = int(1.5 / POLL_S)
    FakeClock(POLL_S, lambda naps: ranks[1].commit(DISPATCH, 1) if naps == late else None).install(monkeypatch)
    assert ranks[0].wait([1, 2], DISPATCH, 1) == [2]
    assert ranks[0]._faults.accused == 0b100


# Waits for one another.


def test_ranks_that_wait_for_each_other_are_told_on_both_sides() -> None:
    """Rank 0 has dispatched step 2 before combining step 1; rank 1 combines first."""
    ranks = waiters(2)
    for rank in ranks:
        rank.commit(DISPATCH, 1)
    ranks[0].commit(DISPATCH, 2)
    ranks[1].commit(COMBINE, 1)
    errors = at_once(lambda: ranks[0].wait([1], DISPATCH, 2), lambda: ranks[1].wait([0], COMBINE, 1))
    for me, error in enumerate(errors):
        assert isinstance(error, MoEEpPeerError) and error.rank == 1 - me, error
        assert "dispatch of step 2" in str(error) and "combine of step 1" in str(error)
        assert "all ranks must make the same calls in the same order" in str(error)
    assert "rank 1 itself waits in combine of step 1 for rank 0" in str(errors[0])


def test_one_sighting_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's words are not read at one instant: only what is seen twice in a row counts."""
    ranks = waiters(2, timeout_s=2.0)

    def flicker(naps: int) -> None:
        ranks[1].publish(Word.WAITING_OPERATION, COMBINE)
        ranks[1].publish(Word.WAITING_STEP, 1)
        ranks[1].publish(Word.WAITING_ON, 0 + 1 if naps % 2 else 0)
        if naps == 9:
            ranks[1].commit(DISPATCH, 2)

    FakeClock(POLL_S, flicker).install(monkeypatch)
    assert ranks[0].wait([1], DISPATCH, 2) == []


def test_a_peer_that_waits_for_what_we_have_committed_is_only_slow_to_see_it() -> None:
    ranks = waiters(2)
    ranks[0].commit(COMBINE, 1)
    ranks[1].publish(Word.WAITING_OPERATION, COMBINE)
    ranks[1].publish(Word.WAITING_STEP, 1)
    ranks[1].publish(Word.WAITING_ON, 0 + 1)

    def commit() -> None:
        time.sleep(4 * POLL_S)
        ranks[1].commit(DISPATCH, 2)

    assert at_once(lambda: ranks[0].wait([1], DISPATCH, 2), commit) == [[], None]


def test_a_block_in_words() -> None:
    me, peer = waiters(2)
    assert peer.describe(0) == "not started, step 0, none"
    me.publish(Word.STATE, State.FAILED_STEP), me.publish(Word.STEP, 8), me.publish(Word.OPERATION, COMBINE)
    me.publish(Word.WAITING_ON, 2)
    assert peer.describe(0) == "FAILED_STEP, step 8, combine, waiting for rank 1"
