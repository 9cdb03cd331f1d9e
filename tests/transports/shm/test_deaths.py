"""Ranks that are killed, at any moment: the others are told who it was, and nothing is left of it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefleet import BootstrapConfig, EpLayout, MoEEpError, MoEEpPeerError
from moefleet.launch import RankPool, launch
from tests.transports.shm.leftovers import grown, mapped_anywhere, of_this_process, segments
from tests.transports.shm.ranks import fleet_of, step

W = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of this file's own: it wears them out."""
    with RankPool(W, threads_per_rank=1) as pool:
        yield pool


def new_in_shm(before: set[str]) -> set[str]:
    """Files that stay. Other programs of this machine make and remove theirs all the time."""
    new = set(os.listdir("/dev/shm")) - before
    end = time.monotonic() + 10
    while new and time.monotonic() < end:
        time.sleep(0.05)
        new &= set(os.listdir("/dev/shm"))
    return new


def kill_me_in(delay_s: float) -> None:
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def until_it_breaks(bootstrap: BootstrapConfig, layout: EpLayout, victim: int, delay_s: float) -> MoEEpError:
    """Steps until a peer is missing."""
    with fleet_of(bootstrap, layout) as fleet:
        step(fleet)
        if bootstrap.rank == victim:
            kill_me_in(delay_s)
        seed = 0
        while True:
            try:
                step(fleet, seed)
            except MoEEpError as error:
                return error.with_traceback(None)  # which would keep the Fleet
            seed += 1


def one_dies(bootstrap: BootstrapConfig, layout: EpLayout, victim: int, delay_s: float) -> Any:
    fleet_of(bootstrap, layout).destroy()  # what a first Fleet leaves in a process for good is there
    before = of_this_process()
    error = until_it_breaks(bootstrap, layout, victim, delay_s)
    return error, before, of_this_process()


DICE = random.Random(5)


@pytest.mark.parametrize(
    "victim, delay_s", [(victim, round(DICE.uniform(0.05, 0.3), 3)) for victim in (1, 0, 3, 2)], ids=str
)
def test_a_rank_that_is_killed_is_named(pool: RankPool, victim: int, delay_s: float) -> None:
    """Also one in the middle of the list. Whoever waits for it is told; nobody runs into a time-out."""
    in_shm = set(os.listdir("/dev/shm"))
    layout = list(EpLayout)[victim % 3]
    results = pool.run(one_dies, layout, victim, delay_s, timeout_s=60.0)
    assert results[victim].exitcode == -signal.SIGKILL
    for result in results:
        if result.rank == victim:
            continue
        assert result.error is None, result.error
        error, before, after = result.value
        assert isinstance(error, MoEEpPeerError) and error.rank == victim, error
        assert f"rank {victim}" in str(error)
        assert not grown(before, after)
    assert not new_in_shm(in_shm)


def dies_while_building(bootstrap: BootstrapConfig, victim: int, delay_s: float) -> Any:
    before = of_this_process()
    if bootstrap.rank == victim:
        kill_me_in(delay_s)
    try:
        for _ in range(200):
            fleet_of(replace(bootstrap, timeout_s=2.0)).destroy()
    except MoEEpError as error:
        caught = error.with_traceback(None)
    else:
        return None
    return caught, before, of_this_process()


def test_a_rank_that_is_killed_while_fleets_are_built(pool: RankPool) -> None:
    """The others get an error of ours within timeout_s, and what they had built so far is gone."""
    assert all(result.error is None for result in pool.run(dies_while_building, -1, 0.0, timeout_s=60.0))
    victim = 1
    for result in pool.run(dies_while_building, victim, 0.15, timeout_s=60.0):
        if result.rank == victim:
            assert result.exitcode == -signal.SIGKILL
            continue
        assert result.error is None, result.error
        error, before, after = result.value
        assert isinstance(error, MoEEpError) and "rank" in str(error), error
        assert not grown(before, after)


def all_die(bootstrap: BootstrapConfig, folder: str, delay_s: float) -> None:
    with fleet_of(bootstrap) as fleet:
        step(fleet)
        (Path(folder) / str(bootstrap.rank)).write_text(" ".join([str(os.getpid()), *segments()]))
        kill_me_in(delay_s)
        for seed in range(10**9):
            step(fleet, seed)


def test_nothing_outlives_ranks_that_are_all_killed(pool: RankPool, tmp_path: Path) -> None:
    in_shm = set(os.listdir("/dev/shm"))
    results = pool.run(all_die, str(tmp_path), 0.2, timeout_s=60.0)
    assert any(result.exitcode == -signal.SIGKILL for result in results)
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(W)]
    inodes = {inode for _, *some in said for inode in some}
    assert len(inodes) == W
    for pid, *_ in said:
        if os.path.exists(f"/proc/{pid}"):  # a rank that learned of another's death before its own is in the pool still
            assert not segments(int(pid))
    assert mapped_anywhere(inodes) == set()
    assert not new_in_shm(in_shm)


def leaves_a_child(bootstrap: BootstrapConfig) -> Any:
    """Rank 1 dies, and a child that it forked keeps its sockets open: only the process itself tells."""
    store = bootstrap.tcp_store
    with fleet_of(bootstrap) as fleet:
        step(fleet)
        if bootstrap.rank == 1:
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            store.set("child", str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        child = int(store.get("child"))
        with pytest.raises(MoEEpPeerError) as caught:
            step(fleet)
        os.kill(child, 0)  # it is still there
        if store.add("seen", 1) == bootstrap.world_size - 1:
            os.kill(child, signal.SIGKILL)
        return caught.value


def test_a_death_is_seen_although_a_child_holds_the_sockets() -> None:
    for result in launch(leaves_a_child, 2, timeout_s=60.0, threads_per_rank=1):
        if result.rank == 1:
            assert result.exitcode == -signal.SIGKILL
        else:
            assert result.error is None, result.error
            assert isinstance(result.value, MoEEpPeerError) and result.value.rank == 1
            assert "its process has ended" in result.value.reason
