"""What a call on ranks does, told with one pool: values, errors, deaths, output, and the store of each call."""

from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpTimeoutError
from moefleet.launch import RankPool
from moefleet.launch.pool import usable_cores
from moefleet.launch.stacks import SIGNAL

pytestmark = pytest.mark.timeout(120)
W = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(W) as pool:
        yield pool


def pid_of(bootstrap: BootstrapConfig) -> int:
    return os.getpid()


def who(bootstrap: BootstrapConfig, *args: Any) -> tuple[Any, ...]:
    return bootstrap.rank, bootstrap.world_size, *args


def pids(pool: RankPool) -> list[int]:
    return [result.value for result in pool.run(pid_of)]


def test_results_come_in_rank_order(pool: RankPool) -> None:
    results = pool.run(who, "a", [1.5])
    assert [result.rank for result in results] == [0, 1, 2]
    assert [result.value for result in results] == [(rank, W, "a", [1.5]) for rank in range(W)]
    assert [(result.error, result.exitcode) for result in results] == [(None, 0)] * W


def test_a_call_may_use_fewer_ranks(pool: RankPool) -> None:
    assert [result.value for result in pool.run(who, world_size=2)] == [(0, 2), (1, 2)]
    with pytest.raises(MoEEpConfigError, match="world_size: got 4, allowed 1 to 3"):
        pool.run(who, world_size=4)


def test_processes_stay_between_calls(pool: RankPool) -> None:
    first = pids(pool)
    assert len({*first, os.getpid()}) == W + 1
    assert pids(pool) == first


def threads(bootstrap: BootstrapConfig) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_the_cores_are_divided(pool: RankPool) -> None:
    expected = max(1, usable_cores() // W)
    assert pool.run(threads)[0].value == (expected, str(expected))


# Values.


def double_in_place(bootstrap: BootstrapConfig, x: torch.Tensor, nested: dict[str, Any]) -> tuple[torch.Tensor, bool]:
    x *= bootstrap.rank + 2
    nested["bf16"].zero_()
    return x, x.is_shared()


def test_large_tensors_travel_by_value_both_ways(pool: RankPool) -> None:
    x = torch.arange(4_000_000, dtype=torch.float32)  # 16 MB, far more than any pipe holds
    nested = {"bf16": torch.ones(3, dtype=torch.bfloat16)}
    for result in pool.run(double_in_place, x, nested):
        assert result.error is None
        y, is_shared = result.value
        torch.testing.assert_close(y, torch.arange(4_000_000, dtype=torch.float32) * (result.rank + 2))
        assert not is_shared
    torch.testing.assert_close(x, torch.arange(4_000_000, dtype=torch.float32))
    assert nested["bf16"].sum() == 3


def a_thread(bootstrap: BootstrapConfig) -> Any:
    return threading.Lock() if bootstrap.rank == 0 else "fine"


def test_a_return_value_that_cannot_be_pickled_is_an_error_that_says_so(pool: RankPool) -> None:
    bad, good, _ = pool.run(a_thread)
    assert isinstance(bad.error, MoEEpConfigError)
    assert "return value of fn on rank 0: got a lock that cannot be pickled" in str(bad.error)
    assert bad.exitcode == 1
    assert good.value == "fine"


class OnlyThere:
    """Can be unpickled in no process but the one it was made in."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __reduce__(self) -> Any:
        return check_pid, (self.pid,)


def check_pid(pid: int) -> OnlyThere:
    if pid != os.getpid():
        raise LookupError(f"not process {pid}")
    return OnlyThere()


def only_there(bootstrap: BootstrapConfig) -> OnlyThere:
    return OnlyThere()


def test_a_value_that_cannot_be_loaded_is_an_error_on_either_side(pool: RankPool) -> None:
    result = pool.run(only_there, world_size=1)[0]
    assert isinstance(result.error, MoEEpError)
    assert "return value of rank 0 cannot be unpickled here: LookupError" in str(result.error)
    with pytest.raises(MoEEpConfigError, match=r"rank 0: got LookupError: not process .* while it loaded"):
        pool.run(who, OnlyThere(), world_size=1)
    assert [result.error for result in pool.run(who)] == [None] * W


# Errors.


class TwoPartError(Exception):
    """Comes out of pickle broken: its arguments are not its message."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


def fail(bootstrap: BootstrapConfig) -> str:
    if bootstrap.rank == 0:
        raise MoEEpTimeoutError("rank 7 is late", ranks=[7])
    if bootstrap.rank == 1:
        raise TwoPartError("salt", "pepper")
    raise SystemExit(5)


def test_an_exception_arrives_with_its_traceback(pool: RankPool) -> None:
    before = pids(pool)
    itself, unpicklable, left = pool.run(fail)
    assert isinstance(itself.error, MoEEpTimeoutError)
    assert (str(itself.error), itself.error.ranks) == ("rank 7 is late", (7,))
    assert 'raise MoEEpTimeoutError("rank 7 is late", ranks=[7])' in str(itself.error.__cause__)
    assert type(unpicklable.error) is MoEEpError
    assert "rank 1 raised " in str(unpicklable.error)
    assert "TwoPartError: salt and pepper" in str(unpicklable.error)
    assert 'raise TwoPartError("salt", "pepper")' in str(unpicklable.error.__cause__)
    assert "rank 2 raised SystemExit: 5" in str(left.error)
    assert [result.exitcode for result in (itself, unpicklable, left)] == [1, 1, 1]
    assert pids(pool) == before


def test_a_function_without_a_name_is_refused(pool: RankPool) -> None:
    def local(bootstrap: BootstrapConfig) -> None: ...

    for fn, name in ((lambda bootstrap: 1, "<lambda>"), (local, "<locals>.local")):
        with pytest.raises(MoEEpConfigError, match=f"fn: got .*{name}.*top level of a module") as caught:
            pool.run(fn)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(MoEEpConfigError, match="args: got a value that cannot be pickled"):
        pool.run(who, threading.Lock())


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, None])
def test_a_bad_world_size_is_refused(bad: Any) -> None:
    with pytest.raises(MoEEpConfigError, match="world_size: got"):
        RankPool(bad)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "3"])
def test_a_bad_timeout_is_refused(pool: RankPool, bad: Any) -> None:
    with pytest.raises(MoEEpConfigError, match="timeout_s: got"):
        pool.run(who, timeout_s=bad)


def test_a_bad_number_of_threads_is_refused() -> None:
    with pytest.raises(MoEEpConfigError, match="threads_per_rank: got 0"):
        RankPool(1, threads_per_rank=0)


def test_a_rank_that_does_not_start_tells_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "moefleet" / "__init__.py"
    package.parent.mkdir()
    package.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)  # where a rank looks for this package before it can serve
    with RankPool(1, start_timeout_s=4.0) as slow, pytest.raises(MoEEpTimeoutError) as caught:
        slow.run(who)
    assert caught.value.ranks == (0,)
    first, second, *_, call, source = str(caught.value).splitlines()
    assert first == "ranks [0] did not start within 4.0 s"
    assert second == "nursery stood here, innermost call last:"
    assert (call, source) == (f'  File "{package}", line 2, in <module>', "    time.sleep(1000)")


# Output.


def talk(bootstrap: BootstrapConfig) -> None:
    if bootstrap.rank == 0:
        print("first\nsecond")
        print("no newline", end="")
        print("grüße", file=sys.stderr)
        ctypes.CDLL(None).puts(b"from C")
    else:
        for _ in range(200):
            print("x" * 1000)


def test_output_is_passed_on_line_by_line(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(who)
    capsys.readouterr()
    pool.run(talk)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("[rank 0] ")] == [
        "[rank 0] first",
        "[rank 0] second",
        "[rank 0] no newlinefrom C",
    ]
    assert lines.count("[rank 1] " + "x" * 1000) == lines.count("[rank 2] " + "x" * 1000) == 200
    assert len(lines) == 403
    assert err == "[rank 0] grüße\n"


def test_output_that_the_parent_cannot_encode_is_no_failure(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", ascii_only)
    assert pool.run(talk, world_size=1)[0].error is None
    ascii_only.seek(0)
    assert ascii_only.read() == "[rank 0] gr??e\n"


# The store.


def add_and_wait(bootstrap: BootstrapConfig) -> tuple[int, bool, bytes]:
    store = bootstrap.tcp_store
    count = store.add("count", 1)
    if count == bootstrap.world_size:
        store.set("all", "here")
    store.wait(["all"], timedelta(seconds=30))
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(milliseconds=50))
    return count, store.check(["all", "never"]), store.compare_set("leader", "", "me")


def test_each_call_has_a_store_of_its_own(pool: RankPool) -> None:
    for _ in range(2):
        results = pool.run(add_and_wait)
        assert [result.error for result in results] == [None] * W
        assert sorted(result.value[0] for result in results) == [1, 2, 3]
        assert {result.value[1:] for result in results} == {(False, b"me")}


# The end.


def stop(bootstrap: BootstrapConfig) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_nothing_is_left_after_close(pool: RankPool) -> None:
    pool.run(who)  # and with it all that torch opens once and keeps
    before = len(os.listdir("/dev/fd"))
    other = RankPool(1)
    pid = other.run(pid_of)[0].value
    assert other.run(die)[0].exitcode == -9
    again = other.run(pid_of)[0].value
    stopped = other.run(stop, timeout_s=0.5)[0]
    assert stopped.exitcode == -signal.SIGKILL
    assert str(stopped.error).splitlines() == [
        "rank 0 did not return within 0.5 s and was ended",
        "rank 0 did not answer SIGURG with its stacks, as one that is stopped cannot",
    ]
    other.close()
    other.close()
    assert len(os.listdir("/dev/fd")) <= before
    for gone in (pid, again):
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)
    with pytest.raises(MoEEpConfigError, match="a call after close"):
        other.run(who)


# Deaths: last, as the ranks they cost would have to be started again.


def die(bootstrap: BootstrapConfig) -> str:
    if bootstrap.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if bootstrap.rank == 1:
        sys.stdout.flush()
        os._exit(0)
    return "alive"


def test_a_dead_rank_is_told_and_restarted(pool: RankPool) -> None:
    before = pids(pool)
    killed, left, alive = pool.run(die)
    assert killed.exitcode == -9
    assert "rank 0 was killed by SIGKILL (signal 9) before fn returned" in str(killed.error)
    assert left.exitcode == 0
    assert "rank 1 ended with exit code 0 before fn returned" in str(left.error)
    assert (alive.value, alive.error, alive.exitcode) == ("alive", None, 0)
    after = pids(pool)
    assert after[2] == before[2]
    assert not {after[0], after[1]} & {*before}


def hang(bootstrap: BootstrapConfig) -> str:
    if bootstrap.rank == 0:
        threading.Thread(target=sleep_aside, daemon=True).start()
        time.sleep(1000)
    if bootstrap.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang_in_c()
    caught: list[int] = []
    signal.signal(SIGNAL, lambda number, _: caught.append(number))
    signal.raise_signal(SIGNAL)
    return "done" if caught == [SIGNAL] else "its own handler was not called"


def sleep_aside() -> None:
    time.sleep(1000)


def hang_in_c() -> None:
    """Wait in C for what never comes, and never release the interpreter lock."""
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def test_a_hanging_rank_is_ended_at_the_timeout(
    pool: RankPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wait in ("pool.TERM_GRACE_S", "stacks.WAIT_S"):  # more than a second, where the machine is busy
        monkeypatch.setattr(f"moefleet.launch.{wait}", 3.0)
    pool.run(who)
    start = time.monotonic()
    hung, stubborn, done = pool.run(hang, timeout_s=2.0)
    assert 2.0 <= time.monotonic() - start < 60.0
    assert isinstance(hung.error, MoEEpTimeoutError)
    assert isinstance(hung.error, TimeoutError)
    assert hung.error.ranks == (0,)
    assert "rank 0 did not return within 2.0 s and was ended" in str(hung.error)
    assert isinstance(stubborn.error, MoEEpTimeoutError)
    assert (hung.exitcode, stubborn.exitcode) == (-signal.SIGTERM, -signal.SIGKILL)
    assert (done.value, done.exitcode) == ("done", 0)
    assert "in hang" in capsys.readouterr().err, "the hanging rank shows its stack"
    assert "stood here, innermost call last:" in str(hung.error)
    assert re.search(r"line \d+, in sleep_aside\n    time.sleep\(1000\)\n", str(hung.error))
    assert re.search(r"line \d+, in hang\n    time.sleep\(1000\)$", str(hung.error)), "the main thread comes last"
    assert re.search(r"in hang\n    hang_in_c\(\)\n.* in hang_in_c\n    ctypes.PyDLL.*$", str(stubborn.error))
