"""`launch` for one call in new processes, `RankPool` for many calls in processes that stay."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from ..errors import config_error
from .interpreter import module_path
from .nursery import Nursery
from .process import KILL_GRACE_S, TERM_GRACE_S, RankProcess, ask_where_they_stand, end, pump, wait_until_started
from .results import RankResult, raise_if_unusable, result_of
from .wire import Call, dumps

FORKS = sys.platform == "linux"
"""Whether ranks are forked from a nursery, where that is safe; else each is a new interpreter."""

GOODBYE = "goodbye"
GOODBYE_GRACE_S = 5.0


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: tuple[Any, ...] = (),
    timeout_s: float = 60.0,
    threads_per_rank: int | None = None,
    start_timeout_s: float = 120.0,
    preload: Sequence[str] = (),
) -> list[RankResult]:
    """Run ``fn(bootstrap, *args)`` on ``world_size`` ranks, each a new process of this machine.

    ``bootstrap`` is a :class:`~moefleet.BootstrapConfig` with the rank, the world size and a ``tcp_store`` that lives
    in this process. Arguments and return values travel by value, tensors too. What a rank prints appears here, each
    line behind ``[rank N]``. A rank that fails does not end the others. Ctrl-C ends them all.

    On Linux one new interpreter, the nursery, imports torch, and the ranks are forked from it. Elsewhere, or where what
    it imports starts threads or opens a GPU, every rank is one of its own.

    Args:
        fn: a function that pickle can name: at the top level of a module, or of a script with a ``__main__`` guard.
        world_size: number of ranks, at least 1.
        args: further arguments, the same for every rank.
        timeout_s: seconds from when all ranks have started until a rank's process must have ended by itself. Then the
            Python stacks of its threads become part of its error, and it gets SIGTERM and, a second later, SIGKILL.
            The stacks come by SIGURG, also out of C code that holds the interpreter lock, and within a second or not at
            all: a stopped process has none to show, nor one where fn set a handler of its own for SIGURG, which stays.
        threads_per_rank: size of torch's and OpenMP's thread pools; ``None`` divides this process's cores.
        start_timeout_s: seconds for all ranks to start Python, torch and the script. Then the error has the stacks of
            those that did not.
        preload: names of modules that fn imports and that take long: where ranks are forked they are imported once,
            before. One that starts threads makes every rank a new interpreter.

    Returns:
        One result per rank, in rank order, after every process has ended.

    Raises:
        MoEEpConfigError: an argument is wrong, fn or an argument cannot be pickled or loaded in a rank, or the script
            has no guard. fn ran on no rank, or has been ended where it ran.
        MoEEpTimeoutError: the ranks did not start in time.
        MoEEpError: a rank died before it could run fn.
    """
    with RankPool(
        world_size, threads_per_rank=threads_per_rank, start_timeout_s=start_timeout_s, preload=preload
    ) as pool:
        return pool._run(fn, args, timeout_s, world_size, last=True)


class RankPool:
    """Ranks that stay between calls. Use it as a context manager; it is not for use by two threads at once.

    A rank starts with the first call that needs it. One that died, or was ended at a timeout, starts anew with the
    next such call, with the environment of that time; but what libraries look up as they are loaded with torch (such as
    OpenBLAS its variables), and limits, umask and priority, are of the pool's first start. A rank that raised stays.

    Args:
        world_size: the most ranks of a call.
        threads_per_rank, start_timeout_s, preload: as for :func:`launch`.

    Raises:
        MoEEpConfigError: an argument is out of range, or the script has no ``__main__`` guard.
    """

    def __init__(
        self,
        world_size: int,
        *,
        threads_per_rank: int | None = None,
        start_timeout_s: float = 120.0,
        preload: Sequence[str] = (),
    ) -> None:
        refuse_while_importing_main()
        check_count("world_size", world_size)
        if threads_per_rank is None:
            threads_per_rank = max(1, usable_cores() // world_size)
        check_count("threads_per_rank", threads_per_rank)
        check_seconds("start_timeout_s", start_timeout_s)
        check_names("preload", preload)
        self.world_size, self.threads_per_rank = world_size, threads_per_rank
        self._start_timeout_s, self._preload = start_timeout_s, tuple(preload)
        self._ranks: dict[int, RankProcess] = {}
        self._forks = FORKS
        self._nursery: Nursery | None = None
        self._store: TCPStore | None = None
        self._calls = 0
        self._closed = False

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, world_size: int | None = None
    ) -> list[RankResult]:
        """Run ``fn(bootstrap, *args)`` on the first ``world_size`` ranks (default: all), as :func:`launch` does.

        Each call's ``tcp_store`` starts empty: a ``PrefixStore`` over the one connection of that rank, so a thread
        that fn leaves behind must not wait on it. Whatever else fn leaves in its process, later calls find there.

        Args:
            timeout_s: seconds from when all ranks have started until fn must have returned.

        Returns, raises:
            as :func:`launch`, except that the processes stay; also MoEEpConfigError after :meth:`close`.
        """
        world_size = self.world_size if world_size is None else world_size
        return self._run(fn, args, timeout_s, world_size, last=False)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self._closed = True
        ranks = list(self._ranks.values())
        try:
            for rank in ranks:
                rank.send(GOODBYE)
            pump(ranks, RankProcess.has_ended, time.monotonic() + GOODBYE_GRACE_S)
        finally:
            self._end(ranks)
            self._end_nursery()
            self._ranks.clear()
            self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, world_size: int, *, last: bool
    ) -> list[RankResult]:
        if self._closed:
            raise config_error("RankPool", "a call after close()", "calls before it", "make a new pool")
        check_count("world_size", world_size, self.world_size)
        check_seconds("timeout_s", timeout_s)
        payload = pickle_call(fn, args)
        ranks = self._started(world_size)

        def is_done(rank: RankProcess) -> bool:
            if rank.reply is not None:
                raise_if_unusable(rank.rank, *rank.reply)
            return rank.has_ended() or (rank.reply is not None and not last)

        try:
            self._calls += 1
            prefix = "" if last else f"call-{self._calls}"
            for rank in ranks:
                rank.send(Call(rank.rank, world_size, prefix, timeout_s, module_path(), last), payload)
            late = pump(ranks, is_done, time.monotonic() + timeout_s)
            ask_where_they_stand(late)
            self._end(late, grace_s=TERM_GRACE_S)
        except BaseException:
            self._end([rank for rank in ranks if rank.reply is None])
            raise
        return [result_of(rank, timeout_s if rank in late else None, last) for rank in ranks]

    def _started(self, world_size: int) -> list[RankProcess]:
        """The first ``world_size`` ranks, alive and ready; those that are missing are started side by side."""
        missing = [number for number in range(world_size) if self._is_missing(number)]
        new: list[RankProcess] = []
        deadline = time.monotonic() + self._start_timeout_s
        try:
            if missing:
                self._ready_nursery(missing, deadline)
            for number in missing:
                self._ranks[number] = RankProcess(number, self.threads_per_rank, self._nursery)
                new.append(self._ranks[number])
            if self._store is None:
                self._store = host_store()
            for rank in new:
                rank.greet(self._store.port)
            wait_until_started(new, self._start_timeout_s, deadline)
            for rank in new:
                if rank.reply is not None:
                    raise_if_unusable(rank.rank, *rank.reply)
        except BaseException:
            self._end(new)
            raise
        return [self._ranks[number] for number in range(world_size)]

    def _is_missing(self, number: int) -> bool:
        return number not in self._ranks or self._ranks[number].has_ended()

    def _ready_nursery(self, missing: list[int], deadline: float) -> None:
        """See to it that there is a nursery which can fork, unless this pool's ranks start without one."""
        if not self._forks or (self._nursery is not None and not self._nursery.has_ended()):
            return
        self._nursery = Nursery(self.threads_per_rank, ranks=missing, preload=self._preload)
        try:
            wait_until_started([self._nursery], self._start_timeout_s, deadline)
            self._forks = self._nursery.can_fork()
        except BaseException:
            self._end_nursery()
            raise
        if not self._forks:
            self._end_nursery()

    def _end(self, ranks: list[RankProcess], *, grace_s: float = 0.0) -> None:
        end(ranks, grace_s=grace_s)
        if self._nursery is not None and not all(rank.has_ended() for rank in ranks):
            self._end_nursery()  # it takes no orders, as one that is stopped cannot; what it forked ends with it
            pump(ranks, RankProcess.has_ended, time.monotonic() + KILL_GRACE_S)

    def _end_nursery(self) -> None:
        if self._nursery is not None:
            end([self._nursery])
            self._nursery = None


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)`` by value, or say which of them cannot be."""
    try:
        dumps(fn)
    except Exception as error:
        raise config_error(
            "fn",
            f"{getattr(fn, '__qualname__', fn)!r}, which cannot be pickled ({error})",
            "a function at the top level of a module or script",
            "give a lambda or local function a name there, and pass what it captured as an argument",
        ) from error
    try:
        return dumps((fn, args))
    except Exception as error:
        raise config_error(
            "args", f"a value that cannot be pickled ({error})", "values that pickle can carry"
        ) from error


def host_store() -> TCPStore:
    """A new store in this process, reachable from this machine only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def refuse_while_importing_main() -> None:
    """Raise where a child process is importing the script that wants to start it: the script has no guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise config_error(
            "launch",
            "a call while a rank imports the script",
            "calls from behind the guard",
            'every rank imports the script that starts it, so write there\n\n    if __name__ == "__main__":\n'
            "        launch(...)\n",
        )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_count(name: str, got: object, most: int | None = None) -> None:
    if not isinstance(got, int) or isinstance(got, bool) or got < 1 or (most is not None and got > most):
        raise config_error(name, repr(got), "a whole number of at least 1" if most is None else f"1 to {most}")


def check_names(name: str, got: Sequence[str]) -> None:
    if isinstance(got, str) or not all(isinstance(each, str) for each in got):
        raise config_error(name, repr(got), "a sequence of modules' names", 'for one of them write ["its.name"]')


def check_seconds(name: str, got: object) -> None:
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not 0 < got < math.inf:
        raise config_error(name, repr(got), "a finite number of seconds above 0")
