"""Ranks of one host: built together or not at all, and left in an orderly way."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moefleet import BootstrapConfig, MoEEpConfigError, MoEEpPeerError
from moefleet.fleet import Meeting
from moefleet.substrate.control import MAGIC, Operation, State, Word
from moefleet.substrate.faults import FaultState
from moefleet.substrate.group import HostGroup
from tests.fleet.threads import WAIT_S, side_by_side
from tests.transports.shm.leftovers import grown

SIZE = 8192


def build(bootstrap: BootstrapConfig, size: int = SIZE) -> HostGroup:
    rank, world = bootstrap.rank, bootstrap.world_size
    return HostGroup(
        rank,
        world,
        size=size,
        align=24,
        exchange=Meeting(bootstrap).exchange,
        incarnation=1000 + rank,
        spin_s=0.0,
        timeout_s=WAIT_S,
        silence_s=WAIT_S,
        faults=FaultState(rank, world),
    )


def present() -> dict[str, int]:
    """Descriptors, threads and mappings of ours in this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    return {"descriptors": descriptors, "threads": threads, "mappings": maps.count("memfd:moefleet")}


def test_everybody_sees_everybodys_block() -> None:
    groups = side_by_side(3, build)
    for group in groups:
        assert group.range.stride % 24 == 0 and len(group.memory) == 3 * group.range.stride
        for rank in range(3):
            assert group.waiter.said(rank, Word.MAGIC) == MAGIC
            assert group.waiter.said(rank, Word.INCARNATION) == 1000 + rank
            assert group.waiter.said(rank, Word.STATE) == State.RUNNING
        assert group.gone() == []
    groups[1].memory[groups[1].range.stride + 4096] = 99
    assert [group.memory[group.range.stride + 4096] for group in groups] == [99, 99, 99]
    for group in groups:
        group.close()


def test_nothing_is_left_after_close() -> None:
    side_by_side(1, build)[0].close()
    before = present()
    groups = side_by_side(3, build)
    assert present()["mappings"] == before["mappings"] + 9
    for group in groups:
        group.close()
        group.close()
    assert all(group.closed for group in groups)
    del groups, group
    assert not grown(before, present())


def test_a_group_that_nobody_closes_leaves_when_it_is_collected() -> None:
    groups = side_by_side(2, build)
    del groups[0]
    gc.collect()
    assert groups[0].waiter.said(0, Word.STATE) == State.DEPARTED
    groups[0].close()


def test_who_leaves_says_so_and_is_known_to_be_gone() -> None:
    groups = side_by_side(3, build)
    groups[1].close()
    for rank in (0, 2):
        assert groups[rank].gone() == [1]
        with pytest.raises(MoEEpPeerError, match="it has left"):
            groups[rank].waiter.wait([1], Operation.DISPATCH, 1)
    for group in groups:
        group.close()


def one_has_no_memory(bootstrap: BootstrapConfig) -> HostGroup:
    return build(bootstrap, 0 if bootstrap.rank == 1 else SIZE)  # the kernel refuses to make room for nothing


def test_one_rank_without_memory_is_named() -> None:
    """It gets the numbers; the others are told at once; nothing is left of the attempt."""
    side_by_side(1, build)[0].close()
    before = present()
    outcomes: list[Any] = side_by_side(3, one_has_no_memory)
    assert isinstance(outcomes[1], MoEEpConfigError) and "0 bytes needed" in str(outcomes[1])
    for rank in (0, 2):
        assert isinstance(outcomes[rank], MoEEpPeerError) and outcomes[rank].rank == 1
        assert "0 bytes needed" in outcomes[rank].reason
    outcomes.clear()
    assert not grown(before, present())


def breaks_at(step: str) -> Callable[[BootstrapConfig], HostGroup]:
    """Rank 1 meets nobody any more from this exchange on."""

    def build_part(bootstrap: BootstrapConfig) -> HostGroup:
        meeting = Meeting(bootstrap)

        def exchange(name: str, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
            def fail() -> dict[str, Any]:
                raise OSError("out of luck")

            return meeting.exchange(name, fail if bootstrap.rank == 1 and name == step else make)

        fields = {"size": SIZE, "align": 1, "incarnation": 1, "spin_s": None, "timeout_s": WAIT_S, "silence_s": WAIT_S}
        faults = FaultState(bootstrap.rank, bootstrap.world_size)
        return HostGroup(bootstrap.rank, bootstrap.world_size, exchange=exchange, faults=faults, **fields)

    return build_part


@pytest.mark.parametrize("step", ["segments", "ready"])
def test_a_failure_while_it_is_built_leaves_nothing(step: str) -> None:
    side_by_side(1, build)[0].close()
    before = present()
    outcomes: list[Any] = side_by_side(3, breaks_at(step))
    assert isinstance(outcomes[1], OSError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], MoEEpPeerError) and "out of luck" in outcomes[rank].reason
    outcomes.clear()
    assert not grown(before, present())


def test_a_peer_that_goes_on_after_a_decision_is_seen() -> None:
    groups = side_by_side(2, build)
    groups[1].enter_round(1)
    assert not groups[0].decided(0)  # it is in the round, and runs no steps
    groups[1].leave_round(1)
    assert groups[0].decided(0) and not groups[0].decided(1)
    for group in groups:
        group.close()
