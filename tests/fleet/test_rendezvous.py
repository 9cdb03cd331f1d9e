"""Meetings over a store: late ranks, failed ranks, lost stores; and that no two Fleets ever meet."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from moefleet import (
    BootstrapConfig,
    MoEEpConfigError,
    MoEEpPeerError,
    MoEEpStoreError,
    MoEEpTimeoutError,
)
from moefleet.fleet import Meeting, rendezvous, stores, vigil, witness
from moefleet.fleet.witness import ENDED, identity
from tests.fleet.threads import side_by_side


def say(bootstrap: BootstrapConfig, *words: str) -> tuple[int, list[list[str]]]:
    """One meeting at which everybody says these words, one after the other."""
    meeting = Meeting(bootstrap)
    heard = [meeting.exchange(f"word {n}", lambda w=w: {"it": f"{w} of {bootstrap.rank}"}) for n, w in enumerate(words)]
    return meeting.fleet_id, [[value["it"] for value in values] for values in heard]


def test_everybody_hears_everybody_in_rank_order() -> None:
    outcomes = side_by_side(3, say, "one", "two")
    for number, heard in outcomes:
        assert heard == [["one of 0", "one of 1", "one of 2"], ["two of 0", "two of 1", "two of 2"]]
        assert number == outcomes[0][0]


def test_a_rank_alone_needs_no_store() -> None:
    assert say(BootstrapConfig(1, 0), "hello")[1] == [["hello of 0"]]


def test_meetings_on_one_store_are_never_the_same() -> None:
    store = dist.HashStore()
    numbers = [side_by_side(2, say, f"round {n}", store=store) for n in range(3)]
    assert all(len({number for number, _ in outcomes}) == 1 for outcomes in numbers)
    assert len({outcomes[0][0] for outcomes in numbers}) == 3
    for n, outcomes in enumerate(numbers):
        assert outcomes[0][1] == outcomes[1][1] == [[f"round {n} of 0", f"round {n} of 1"]]


def fast_and_slow(bootstrap: BootstrapConfig) -> list[Any]:
    """Several meetings in a row; rank 1 dawdles, so that rank 0 is ahead by one whenever it can be."""
    got = []
    for n in range(5):
        if bootstrap.rank:
            time.sleep(0.02)
        got.append(say(bootstrap, f"meeting {n}"))
    return got


def test_a_rank_that_is_ahead_meets_nobody_of_the_meeting_before() -> None:
    first, second = side_by_side(2, fast_and_slow)
    assert first == second
    assert [heard for _, heard in first] == [[[f"meeting {n} of 0", f"meeting {n} of 1"]] for n in range(5)]


def test_incarnations_are_drawn_at_random_unless_given() -> None:
    drawn = {Meeting(BootstrapConfig(1, 0)).incarnation for _ in range(3)}
    assert len(drawn) == 3
    assert Meeting(BootstrapConfig(1, 0, incarnation=7)).incarnation == 7


# Ranks that do not come, or come late.

SHORT_S = 0.8
"""A time-out that is to end a wait: threads that have something to say are not that late."""


def absent(bootstrap: BootstrapConfig, missing: int) -> Any:
    return None if bootstrap.rank == missing else say(bootstrap, "hello")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_who_does_not_come_is_named(missing: int) -> None:
    outcomes = side_by_side(3, absent, missing, timeout_s=SHORT_S)
    for rank, error in enumerate(outcomes):
        if rank != missing:
            assert isinstance(error, MoEEpTimeoutError) and error.ranks == (missing,), error
            assert f"rank {rank} waited {SHORT_S} s (BootstrapConfig.timeout_s) for ranks [{missing}]" in str(error)


def comes_late(bootstrap: BootstrapConfig, late: int, gone: threading.Barrier) -> Any:
    """All but one give up, then it comes; they come again."""
    error = None
    if bootstrap.rank != late:
        with pytest.raises(MoEEpTimeoutError) as caught:
            say(replace(bootstrap, timeout_s=SHORT_S), "first")
        error = caught.value
    gone.wait(20)
    return error, say(bootstrap, "second")


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_comes_late_meets_the_others_at_the_next(late: int) -> None:
    """A meeting that a rank missed is over."""
    outcomes = side_by_side(3, comes_late, late, threading.Barrier(3))
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Exception), outcome
        error, (_, heard) = outcome
        assert (error is None) == (rank == late)
        assert heard == [["second of 0", "second of 1", "second of 2"]]


# Ranks that fail.


def fails(bootstrap: BootstrapConfig, culprits: set[int], pause: float) -> Any:
    """A meeting at which some cannot say their word, then one that works. Rank 2 comes last to each."""

    def word() -> dict[str, Any]:
        if bootstrap.rank in culprits:
            raise MoEEpConfigError(f"rank {bootstrap.rank} is out of words")
        return {}

    if bootstrap.rank == 2:
        time.sleep(pause)
    try:
        Meeting(bootstrap).exchange("word", word)
        outcome: Any = None
    except Exception as error:
        outcome = error
    return outcome, say(bootstrap, "again")


@pytest.mark.parametrize("culprits", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["together", "one_later"])
def test_a_rank_that_fails_tells_all_others_also_those_that_come_later(culprits: set[int], pause: float) -> None:
    outcomes = side_by_side(3, fails, culprits, pause)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Exception), outcome
        error, (_, heard) = outcome
        if rank in culprits:
            assert isinstance(error, MoEEpConfigError) and f"rank {rank} is out of words" in str(error)
        else:
            assert isinstance(error, MoEEpPeerError) and error.rank in culprits, error
            assert error.reason == f"MoEEpConfigError: rank {error.rank} is out of words"
            assert str(error) == f"rank {error.rank} could not build the Fleet: {error.reason}"
        assert heard == [["again of 0", "again of 1", "again of 2"]]


def stumbles(bootstrap: BootstrapConfig, error: Exception) -> Any:
    """Rank 1 fails between two exchanges; rank 2 comes when that is long over."""
    if bootstrap.rank == 2:
        time.sleep(0.15)
    meeting = Meeting(bootstrap)
    with meeting.announcing():
        meeting.exchange("first", dict)
        if bootstrap.rank == 1:
            raise error
        meeting.exchange("second", dict)


def test_a_rank_that_fails_between_exchanges_tells_all_others() -> None:
    others = side_by_side(3, stumbles, OSError("no space " + "." * 10_000))
    assert isinstance(others.pop(1), OSError)
    for error in others:
        assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
        assert error.reason.startswith("OSError: no space ...") and len(error.reason) <= vigil.REASON_CHARS


def test_a_rank_that_blames_another_does_not_hide_what_that_one_says() -> None:
    store = dist.HashStore()
    first, second, third = (Meeting(BootstrapConfig(3, rank, tcp_store=store)) for rank in range(3))
    first.fail(MoEEpPeerError("rank 1 ended", rank=1, reason="ended"))
    second.fail(OSError("no space"))
    first.fail(MoEEpPeerError("rank 1 ended", rank=1, reason="ended"))
    with pytest.raises(MoEEpPeerError, match="rank 1 could not build the Fleet: OSError: no space"):
        third.look()


def gives_up(bootstrap: BootstrapConfig) -> Any:
    """Rank 2 stays away, and rank 0 is the first to lose patience."""
    if bootstrap.rank < 2:
        mine = replace(bootstrap, timeout_s=SHORT_S if bootstrap.rank == 0 else bootstrap.timeout_s)
        meeting = Meeting(mine)
        with meeting.announcing():
            meeting.exchange("hello", dict)


def test_who_gives_up_waiting_says_so() -> None:
    for error in side_by_side(3, gives_up)[:2]:
        assert isinstance(error, MoEEpTimeoutError) and error.ranks == (2,), error
        assert f"rank 0 waited {SHORT_S} s" in str(error)


@pytest.fixture
def ended() -> dict[str, Any]:
    """The identity of a process that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        person = {**identity(), "pid": process.pid, "born": witness._process(process.pid)[1]}
        assert witness.seen(person) == ""
        process.kill()
    assert witness.seen(person) == ENDED
    return person


def test_a_rank_whose_process_has_ended_is_not_waited_for(
    ended: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "identity", lambda: ended)
        said = Meeting(BootstrapConfig(2, 1, tcp_store=store))
        said._guard(said.store.set, "first/1", '{"it": 7}')
    meeting = Meeting(BootstrapConfig(2, 0, tcp_store=store))
    assert meeting.exchange("first", lambda: {"it": 0}) == [{"it": 0}, {"it": 7}]  # what it left behind counts
    with pytest.raises(MoEEpPeerError, match="rank 1 could not build the Fleet: its process has ended") as caught:
        meeting.exchange("second", dict)
    assert caught.value.rank == 1
    over = threading.Event()
    with pytest.raises(MoEEpPeerError, match="rank 1"):
        meeting.attend(lambda _: over.wait(60))
    over.set()


def test_what_a_library_raises_or_returns_is_passed_on() -> None:
    meeting = Meeting(BootstrapConfig(1, 0))
    assert meeting.attend(lambda store: store.add("n", 5)) == 5
    with pytest.raises(ZeroDivisionError):
        meeting.attend(lambda _: 1 // 0)
    over = threading.Event()
    with pytest.raises(MoEEpTimeoutError, match=r"waited 0\.3 s .* at 'a connection'"):
        Meeting(BootstrapConfig(1, 0, timeout_s=0.3)).attend(lambda _: over.wait(60))
    over.set()


# Who is who.


def another_process() -> dict[str, Any]:
    """One of this host that runs."""
    return {**identity(), "pid": os.getppid(), "born": witness._process(os.getppid())[1]}


def test_two_groups_on_one_store_without_prefixes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = dist.HashStore(), another_process()
    first = Meeting(BootstrapConfig(2, 0, tcp_store=store))
    monkeypatch.setattr(rendezvous, "identity", lambda: other)
    with pytest.raises(MoEEpConfigError, match="PrefixStore") as caught:
        Meeting(BootstrapConfig(2, 0, tcp_store=store))
    assert f"process {os.getpid()}, which runs, is rank 0 as well" in str(caught.value)
    Meeting(BootstrapConfig(2, 0, tcp_store=dist.PrefixStore("other", store)))
    first.look()  # its own meeting is not spoiled


def test_a_rank_may_change_its_number(ended: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ended, and rank 2 goes on as rank 1; the newcomer becomes rank 2."""
    store, other = dist.HashStore(), another_process()
    for person, rank in ((ended, 1), (other, 2), (other, 1), (identity(), 2)):
        monkeypatch.setattr(rendezvous, "identity", lambda person=person: person)
        Meeting(BootstrapConfig(3, rank, tcp_store=store))


def running(store: Any) -> Meeting:
    """Rank 0 of a running Fleet of two, at the meeting to which it has called a new rank 1."""
    before = Meeting(BootstrapConfig(1, 0, tcp_store=store))
    before.close()  # as create_fleet does
    return Meeting.next_generation(before, BootstrapConfig(2, 0, tcp_store=store))


def test_a_place_is_taken_once_also_under_one_incarnation() -> None:
    """A process that comes back with the incarnation of the one that it replaces is another process all the same."""
    store = dist.HashStore()
    there = running(store)
    again = BootstrapConfig(2, 1, tcp_store=store, incarnation=7, timeout_s=0.2)
    assert Meeting(again).generation == there.generation == 1
    late = Meeting(again)  # it cannot join a meeting at which the others have read what the first one said
    assert (late.incarnation, late.generation) == (7, 0) and late.fleet_id != there.fleet_id
    there.close()
    after = Meeting.next_generation(there, BootstrapConfig(2, 0, tcp_store=store))
    called = Meeting(again)
    assert (called.fleet_id, called.generation) == (after.fleet_id, after.generation)


# Stores.


def test_a_lost_store_is_named() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    port = host.port
    meeting = Meeting(BootstrapConfig(2, 0, tcp_store=client, timeout_s=5.0))
    del host
    with pytest.raises(MoEEpStoreError, match=f"the store at 127.0.0.1:{port} did not answer rank 0"):
        for _ in range(3):
            meeting.exchange("hello", dict)
    with pytest.raises(MoEEpStoreError, match="is the process that hosts it alive"):
        Meeting(BootstrapConfig(2, 0, tcp_store=client, timeout_s=5.0))


def test_a_store_that_ends_during_a_wait() -> None:
    host = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", host[0].port, is_master=False, wait_for_workers=False)
    threading.Timer(0.2, host.clear).start()
    with pytest.raises(MoEEpStoreError, match="did not answer rank 0"):
        Meeting(BootstrapConfig(2, 0, tcp_store=client, timeout_s=30.0)).exchange("hello", dict)


def test_no_store_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(MoEEpConfigError, match="BootstrapConfig: got neither tcp_store nor process_group") as caught:
        Meeting(BootstrapConfig(2, 0))
    assert "moefleet.launch or torchrun" in str(caught.value)


def test_a_store_of_the_environment_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4")
    with pytest.raises(MoEEpStoreError, match=r"no store at 127\.0\.0\.1:4: connection refused"):
        Meeting(BootstrapConfig(2, 1, timeout_s=0.5))
    with pytest.raises(MoEEpConfigError, match="neither tcp_store nor process_group"):
        Meeting(BootstrapConfig(2, 1, auto_bootstrap=False))


def test_a_second_fleet_of_a_process_uses_the_same_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    first, second = (stores.resolve_store(BootstrapConfig(2, 0, timeout_s=20)) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
