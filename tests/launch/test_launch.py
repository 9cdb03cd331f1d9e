"""`launch` as scripts use it: processes that really end, the guard, Ctrl-C, and what is left behind: nothing."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpTimeoutError
from moefleet.launch import launch

pytestmark = pytest.mark.timeout(120)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def one_fate_each(bootstrap: BootstrapConfig, x: torch.Tensor, word: str) -> tuple[torch.Tensor, str, int]:
    print(f"pid {os.getpid()}", flush=True)
    if bootstrap.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if bootstrap.rank == 2:
        ctypes.PyDLL(None).sleep(1000)  # returns early where a signal comes: fn then does what follows
    if bootstrap.rank == 3:  # returns, and then its process does not end
        threading.Thread(target=linger).start()
    assert isinstance(bootstrap.tcp_store, TCPStore)
    bootstrap.tcp_store.set("word", word)
    return x + 1, bootstrap.tcp_store.get("word").decode(), torch.get_num_threads()


def linger() -> None:
    time.sleep(1000)


def test_one_fate_each(capsys: pytest.CaptureFixture[str]) -> None:
    before = len(os.listdir("/dev/fd"))
    x = torch.zeros(300_000)
    results = launch(one_fate_each, 4, args=(x, "w"), timeout_s=10.0, threads_per_rank=2)
    fine, killed, hung, lingering = results
    assert [result.rank for result in results] == [0, 1, 2, 3]
    assert [result.exitcode for result in (fine, killed, lingering)] == [0, -9, -15]
    assert hung.exitcode in (0, -15), "the signal for its stacks wakes it: it may end before SIGTERM"

    assert fine.error is None
    torch.testing.assert_close(fine.value[0], x + 1)
    assert fine.value[1:] == ("w", 2)

    assert type(killed.error) is MoEEpError
    assert "killed by SIGKILL" in str(killed.error)
    assert isinstance(hung.error, MoEEpTimeoutError)
    assert "rank 2 did not return within 10.0 s" in str(hung.error)
    assert "in one_fate_each\n    ctypes.PyDLL(None).sleep(1000)" in str(hung.error)
    assert hung.value is None
    assert isinstance(lingering.error, MoEEpTimeoutError)
    assert "fn returned on rank 3, but its process did not end within 10.0 s" in str(lingering.error)
    assert "in linger\n    time.sleep(1000)\n" in str(lingering.error)
    assert lingering.value[1] == "w"

    for pid in pids_in(capsys.readouterr().out, 4).values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(os.listdir("/dev/fd")) <= before + 2  # torch and multiprocessing keep one each from their first use on


def test_bad_arguments_start_nothing() -> None:
    for bad in (0, -2, 1.0, "2"):
        with pytest.raises(MoEEpConfigError, match=r"world_size: got .*, allowed a whole number of at least 1"):
            launch(one_fate_each, bad)  # type: ignore[arg-type]
    with pytest.raises(MoEEpConfigError, match="timeout_s: got 0"):
        launch(one_fate_each, 1, timeout_s=0)
    with pytest.raises(MoEEpConfigError, match="top level of a module"):
        launch(lambda bootstrap: None, 1)


# Scripts.


def pids_in(text: str, world_size: int) -> dict[int, int]:
    """Rank to process, from the lines `[rank N] pid P`."""
    found = {int(rank): int(pid) for rank, pid in re.findall(r"^\[rank (\d+)\] pid (\d+)$", text, re.MULTILINE)}
    assert sorted(found) == list(range(world_size)), text
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, although nobody may have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.02)


@contextmanager
def running(path: Path, text: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a session of its own, as a terminal would."""
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    script = subprocess.Popen(
        [sys.executable, str(path), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    with script:
        try:
            yield script
        finally:
            script.kill()


def read_pids(script: subprocess.Popen[str], world_size: int) -> dict[int, int]:
    assert script.stdout is not None
    return pids_in("".join(script.stdout.readline() for _ in range(world_size)), world_size)


def test_a_function_of_the_script_itself(tmp_path: Path) -> None:
    text = """
        import os, sys
        from moefleet.launch import launch

        class Odd(Exception): ...

        def work(bootstrap, words):
            os.system("echo shell")
            print("one\\ntwo", file=sys.stderr)
            if bootstrap.rank:
                raise Odd(words)
            return words

        if __name__ == "__main__":
            good, bad = launch(work, 2, args=(["w"],))
            assert good.value == ["w"] and good.exitcode == 0, good
            assert type(bad.error) is Odd and bad.error.args == (["w"],) and bad.exitcode == 1, bad
            print("end")
    """
    with running(tmp_path / "script.py", text) as script:
        out, err = script.communicate()
    assert script.returncode == 0, err
    *ranks, end = out.splitlines()
    assert (sorted(ranks), end) == (["[rank 0] shell", "[rank 1] shell"], "end")
    assert sorted(err.splitlines()) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]


def test_a_missing_guard_shows_what_to_write(tmp_path: Path) -> None:
    text = """
        from moefleet.launch import launch

        def work(bootstrap):
            return 1

        launch(work, 1)
    """
    with running(tmp_path / "script.py", text) as script:
        out, err = script.communicate()
    assert script.returncode == 1
    assert out == ""
    assert "MoEEpConfigError: launch: got a call while a rank imports the script" in err
    assert '\n    if __name__ == "__main__":\n        launch(...)\n' in err
    assert "[rank" not in err, "one error, from the parent"


SLEEPERS = """
    import ctypes, os, sys, time
    from moefleet.launch import launch

    def work(bootstrap):
        print("pid", os.getpid())
        if bootstrap.rank == 0:
            ctypes.PyDLL(None).sleep(1000)  # never releases the interpreter lock
        time.sleep(1000)

    if __name__ == "__main__":
        launch(work, int(sys.argv[1]), timeout_s=500.0)
"""


@linux_only
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path / "script.py", SLEEPERS, "2") as script:
        ranks = read_pids(script, 2)
        os.killpg(script.pid, signal.SIGINT)  # a terminal sends it to the whole group
        out, err = script.communicate(timeout=30)
    assert script.returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1, err
    assert "[rank" not in err
    assert out == ""
    wait_until_gone(*ranks.values())


@linux_only
def test_ranks_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    with running(tmp_path / "script.py", SLEEPERS, "1") as script:
        ranks = read_pids(script, 1)
        script.kill()
        wait_until_gone(*ranks.values())


@linux_only
def test_ranks_started_by_a_thread_outlive_it_but_not_their_parent(tmp_path: Path) -> None:
    text = """
        import os, threading, time
        from moefleet.launch import RankPool

        def work(bootstrap):
            print("pid", os.getpid())

        if __name__ == "__main__":
            pool = RankPool(1)
            thread = threading.Thread(target=pool.run, args=(work,))
            thread.start()
            thread.join()
            assert pool.run(work)[0].error is None
            time.sleep(1000)
    """
    with running(tmp_path / "script.py", text) as script:
        first, second = read_pids(script, 1), read_pids(script, 1)
        assert first == second
        script.kill()
        wait_until_gone(*first.values())
