"""How ranks come to be: forked from one process that imported torch, and like new interpreters in all other ways."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpConfigError, MoEEpError
from moefleet.launch import RankPool, pool, process
from moefleet.launch.nursery import Forked, has_open
from tests.launch.test_launch import linux_only, read_pids, running, wait_until_gone

pytestmark = [pytest.mark.timeout(120), linux_only]


@pytest.fixture(scope="module")
def forked() -> Iterator[RankPool]:
    with RankPool(2, threads_per_rank=2) as ranks:
        yield ranks


def parent_pid(bootstrap: BootstrapConfig) -> int:
    return os.getppid()


def nursery_of(ranks: RankPool) -> int:
    """Its pid."""
    (pid,) = {result.value for result in ranks.run(parent_pid)}
    return int(pid)


def threads_of(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def draws(bootstrap: BootstrapConfig) -> tuple[float, float, int]:
    return random.random(), np.random.random(), torch.initial_seed()


def test_ranks_draw_different_numbers(forked: RankPool) -> None:
    first, second = (result.value for result in forked.run(draws))
    assert all(mine != others for mine, others in zip(first, second, strict=True))


def test_no_thread_runs_where_ranks_are_forked_and_no_signal_to_its_group_ends_it(forked: RankPool) -> None:
    nursery = nursery_of(forked)
    assert nursery != os.getpid()
    assert threads_of(nursery) == 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(nursery, number)
    forked.run(end_somehow)
    assert nursery_of(forked) == nursery, "it has forked them again"


def end_somehow(bootstrap: BootstrapConfig) -> None:
    if bootstrap.rank == 0:
        os._exit(7)
    os.kill(os.getpid(), signal.SIGUSR1)


def surroundings(bootstrap: BootstrapConfig, name: str) -> tuple[int, str | None, str | None, str]:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    in_c = libc.getenv(name.encode())
    return os.getppid(), os.environ.get(name), in_c and in_c.decode(), os.getcwd()


def test_a_rank_that_starts_anew_finds_what_is_so_by_then(
    forked: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nursery = nursery_of(forked)
    monkeypatch.setenv("MOEFLEET_TEST", "grün")
    left, killed = forked.run(end_somehow)
    assert (left.exitcode, killed.exitcode) == (7, -signal.SIGUSR1)
    assert "rank 0 ended with exit code 7 before fn returned" in str(left.error)
    assert "rank 1 was killed by SIGUSR1" in str(killed.error)
    monkeypatch.chdir(tmp_path)
    for result in forked.run(surroundings, "MOEFLEET_TEST"):
        assert result.value == (nursery, "grün", "grün", str(tmp_path))
    monkeypatch.delenv("MOEFLEET_TEST")
    forked.run(end_somehow)
    assert [result.value[:3] for result in forked.run(surroundings, "MOEFLEET_TEST")] == [(nursery, None, None)] * 2


def end_the_nursery(bootstrap: BootstrapConfig) -> None:
    if bootstrap.rank == 0:
        print("pid", os.getpid(), flush=True)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def test_ranks_end_with_their_nursery_and_the_next_call_has_another(
    forked: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    nursery = nursery_of(forked)
    for result in forked.run(end_the_nursery):
        assert type(result.error) is MoEEpError
        assert str(result.error) == (
            f"rank {result.rank} ended with the process that it was forked from, "
            "which was killed by SIGKILL (signal 9), before fn returned"
        )
        assert result.exitcode == -signal.SIGKILL
    wait_until_gone(int(capsys.readouterr().out.split()[-1]), nursery)
    assert nursery_of(forked) != nursery


def stop_the_nursery(bootstrap: BootstrapConfig) -> None:
    if bootstrap.rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


def test_ranks_of_a_nursery_that_is_stopped_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in pool, process:
        monkeypatch.setattr(room, "KILL_GRACE_S", 3.0)
    with RankPool(2) as ranks:
        nursery, pids = nursery_of(ranks), [result.value for result in ranks.run(pid_of)]
        assert [result.exitcode for result in ranks.run(stop_the_nursery, timeout_s=1.0)] == [-signal.SIGKILL] * 2
        wait_until_gone(nursery, *pids)
        assert nursery_of(ranks) != nursery


def loaded(bootstrap: BootstrapConfig, name: str) -> tuple[int, bool]:
    return os.getppid(), name in sys.modules


@pytest.mark.parametrize("threads", [False, True], ids=["quiet", "starts_threads"])
def test_modules_that_are_imported_before(threads: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    (tmp_path / "moefleet_test_long.py").write_text(start if threads else "")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("moefleet_no_such_module", "moefleet_test_long")
    with RankPool(2, preload=names) as ranks:
        found = [result.value for result in ranks.run(loaded, names[1])]
    if threads:
        assert found == [(os.getpid(), False)] * 2, "ranks are new interpreters"
    else:
        assert {pid for pid, _ in found} != {os.getpid()} and all(there for _, there in found)


@pytest.mark.parametrize("wrong", ["transformers", [1]])
def test_what_names_no_modules(wrong: Any) -> None:
    with pytest.raises(MoEEpConfigError, match=r"preload: got .*a sequence of modules' names"):
        RankPool(1, preload=wrong)


def test_a_long_path_is_no_longer_in_the_way_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/no/such/folder/{'x' * 200}/{number}" for number in range(5000))])
    with RankPool(1) as ranks:
        assert ranks.run(pid_of)[0].value > 0


def test_the_pid_of_a_forked_rank_is_known_while_it_runs(forked: RankPool) -> None:
    pids = [result.value for result in forked.run(pid_of)]
    found = [rank._process for rank in forked._ranks.values()]
    assert [each.pid for each in found if isinstance(each, Forked)] == pids


def test_nothing_is_left(forked: RankPool) -> None:
    forked.run(parent_pid)  # and with it all that torch opens once and keeps
    before = len(os.listdir("/proc/self/fd"))
    with RankPool(1) as other:
        pids = nursery_of(other), other.run(pid_of)[0].value
    assert len(os.listdir("/proc/self/fd")) <= before
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def pid_of(bootstrap: BootstrapConfig) -> int:
    return os.getpid()


def test_a_nursery_that_cannot_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "moefleet" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RankPool(1) as ranks, pytest.raises(MoEEpError, match="nursery ended with exit code 1 while it started"):
        ranks.run(parent_pid)
    assert "[nursery] ImportError: not today" in capsys.readouterr().err


def test_ranks_of_a_thread_end_with_their_parent_also_where_they_hold_the_interpreter_lock(tmp_path: Path) -> None:
    text = """
        import ctypes, os, threading, time
        from moefleet.launch import launch

        def work(bootstrap):
            print("pid", os.getpid())
            ctypes.PyDLL(None).sleep(1000)

        if __name__ == "__main__":
            threading.Thread(target=launch, args=(work, 1)).start()
            time.sleep(1000)
    """
    with running(tmp_path / "script.py", text) as script:
        ranks = read_pids(script, 1)
        script.kill()
        wait_until_gone(*ranks.values())


# Where nothing is forked.


def as_it_stands(bootstrap: BootstrapConfig) -> dict[str, Any]:
    """What must not depend on how a rank came to be."""
    matrix = np.ones((700, 700), np.float32)
    _ = matrix @ matrix
    found: dict[str, Any] = {"threads": threads_of("self")}
    _ = torch.from_numpy(matrix) @ torch.from_numpy(matrix)
    open_ = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    places = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in open_]
    return found | {
        "torch threads": (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
        "descriptors": sorted(zip(places, map(os.get_inheritable, open_), strict=True)),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "group": (os.getpgid(0), os.getsid(0)),
        "stdin": os.readlink("/proc/self/fd/0"),
        "flags": tuple(sys.flags),
        "argv": sys.argv,
        "path": sys.path,
        "cuda": (torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()),
    }


def test_an_open_file_is_found_by_how_its_path_begins(tmp_path: Path) -> None:
    with (tmp_path / "gpu0").open("w"):
        assert has_open(str(tmp_path / "gpu"))
    assert not has_open(str(tmp_path / "gpu"))


@pytest.mark.parametrize("why", ["not asked to", "threads run"])
def test_where_ranks_cannot_be_forked_each_is_a_new_interpreter(
    forked: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    if why == "threads run":
        (tmp_path / "sitecustomize.py").write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    else:
        monkeypatch.setattr(pool, "FORKS", False)
    with RankPool(1, threads_per_rank=2) as ranks:
        assert ranks.run(parent_pid)[0].value == os.getpid()
        if why == "not asked to":
            started, fork = (each.run(as_it_stands, world_size=1)[0] for each in (ranks, forked))
            assert (started.error, fork.error) == (None, None)
            assert fork.value == started.value
            assert ranks.run(end_somehow)[0].exitcode == 7
