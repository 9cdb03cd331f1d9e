"""A warm process that forks ranks: torch is imported once, and no thread of it has started when a rank begins."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from types import TracebackType
from typing import Any

MESSAGE = 1 << 16
START_S = 120.0
TICK_MS = 20
PR_SET_PDEATHSIG = 1
PROGRAM = "import sys; sys.path[:] = {path!r}; from moefleet.chaos.nursery import serve; serve({fd}, {life!r})"


class Nursery:
    """The supervisor's side. Use it as a context manager: at its end, or the supervisor's, all ranks are ended.

    Args:
        life: module whose ``main(link, rank, spec)`` is what a rank does. It is imported once, before any fork.
    """

    def __init__(self, life: str = "moefleet.chaos.rank") -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [entry or os.getcwd() for entry in sys.path]
        with theirs:
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=path, fd=theirs.fileno(), life=life)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
        self._link.settimeout(START_S)
        self.ended: dict[int, int] = {}
        """Exit status of every process that has ended and been reaped, by pid."""
        self._receive()

    def fork(self, rank: int, spec: dict[str, Any]) -> tuple[int, socket.socket]:
        """Start a rank. Returns its pid and the socket to it."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._link, [json.dumps({"rank": rank, "spec": spec}).encode()], [theirs.fileno()])
        while (message := self._receive()).get("pid") is None:
            pass
        return message["pid"], mine

    def reap(self) -> None:
        """Read which processes have ended."""
        while select.select([self._link], [], [], 0)[0]:
            self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _receive(self) -> dict[str, Any]:
        data = self._link.recv(MESSAGE)
        if not data:
            raise RuntimeError("the process that forks ranks has ended; see its stderr")
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            self.ended[message["ended"]] = message["status"]
        return message

    def close(self) -> None:
        """End all ranks, and the warm process."""
        self._link.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve(fd: int, life: str) -> None:
    """The warm process: fork on request, reap, and end everything when the supervisor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=fd)
    import gc

    import torch

    main = import_module(life).main
    torch.set_num_threads(1)
    gc.freeze()
    link.send(b"{}")
    alive: set[int] = set()
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        ready = poll.poll(TICK_MS)
        reap(link, alive)
        if not ready:
            continue
        data, fds, _, _ = socket.recv_fds(link, MESSAGE, 1)
        if not data:
            break
        order = json.loads(data)
        pid = os.fork()
        if pid == 0:
            grow_up(link, fds[0], order, main)
        os.close(fds[0])
        alive.add(pid)
        link.send(json.dumps({"pid": pid}).encode())
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    os._exit(0)


def reap(link: socket.socket, alive: set[int]) -> None:
    for pid in list(alive):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            alive.discard(pid)
            with contextlib.suppress(OSError):
                link.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def grow_up(link: socket.socket, fd: int, order: dict[str, Any], main: Any) -> None:
    """In the new process: become a rank. Never returns."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        link.close()
        main(socket.socket(fileno=fd), order["rank"], order["spec"])
    except BaseException:
        traceback.print_exc()
    os._exit(1)
