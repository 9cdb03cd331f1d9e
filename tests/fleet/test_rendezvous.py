"""Meetings over a store: late ranks, failed ranks, lost stores; and that no two Fleets ever meet."""

from __future__ import annotations

import socket
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
from moefleet.fleet import Meeting, rendezvous
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


def absent(bootstrap: BootstrapConfig, missing: int) -> Any:
    return None if bootstrap.rank == missing else say(bootstrap, "hello")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_who_does_not_come_is_named(missing: int) -> None:
    outcomes = side_by_side(3, absent, missing, timeout_s=0.3)
    for rank, error in enumerate(outcomes):
        if rank != missing:
            assert isinstance(error, MoEEpTimeoutError) and error.ranks == (missing,), error
            assert f"rank {rank} waited 0.3 s (BootstrapConfig.timeout_s) for ranks [{missing}]" in str(error)


def comes_late(bootstrap: BootstrapConfig, late: int, gone: threading.Barrier) -> Any:
    """All but one give up, then it comes; they come again."""
    error = None
    if bootstrap.rank != late:
        with pytest.raises(MoEEpTimeoutError) as caught:
            say(replace(bootstrap, timeout_s=0.3), "first")
        error = caught.value
    gone.wait(20)
    return error, say(bootstrap, "second")


@pytest.mark.parametrize("late", [1, 2])  # rank 0 opens meetings: without it there is none that could be over
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
    monkeypatch.setattr(rendezvous, "_stores", {})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    first, second = (rendezvous.resolve_store(BootstrapConfig(2, 0, timeout_s=20)) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
