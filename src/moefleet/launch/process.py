"""The parent's side of one rank: its process, the socket to it, and what it prints."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing import spawn
from typing import Any

from . import stacks
from .output import PrefixedOutput
from .wire import Buffer, Hello, Inbox, Reply, dumps, frame

TICK_S = 0.02  # how late the end of a process may be noticed when something else holds its socket open
TERM_GRACE_S = 1.0
KILL_GRACE_S = 10.0
RECV_BYTES = 1 << 20

# What a new interpreter runs: it needs the parent's sys.path before it can import this package.
PROGRAM = f"""\
import faulthandler, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
stacks = int(sys.argv[2])
os.set_inheritable(stacks, False)
faulthandler.register({int(stacks.SIGNAL)}, file=stacks)
import pickle, socket
control = socket.socket(fileno=int(sys.argv[1]))
stream = control.makefile("rwb")
sys.path[:] = pickle.load(stream)
from moefleet.launch.rank import serve
sys.exit(serve(control, stream))
"""


class RankProcess:
    """A fresh interpreter that serves as one rank. Nothing here blocks: :func:`pump` moves the bytes.

    Args:
        rank: its number, for the prefix of its output.
        threads: size of torch's and OpenMP's thread pools in it.

    Raises:
        OSError: the process or its pipes cannot be made.
    """

    def __init__(self, rank: int, threads: int) -> None:
        self.rank, self._threads = rank, threads
        self._stacks = stacks.Stacks()
        self._too_late = False
        self._inbox = Inbox()
        self._outbox: list[memoryview] = []
        self._reply: tuple[Reply, Buffer] | None = None
        self._preparation = preparation_for(rank)
        self._control, theirs = socket.socketpair()
        with theirs:
            try:
                self._control.sendall(dumps(self._preparation["sys_path"]))
                self._control.setblocking(False)
                self._process = subprocess.Popen(
                    [
                        os.fsdecode(spawn.get_executable()),
                        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                        *("-c", PROGRAM, str(theirs.fileno()), str(self._stacks.fileno())),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=(theirs.fileno(), self._stacks.fileno()),
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                )
            except BaseException:
                self._control.close()
                self._stacks.close()
                raise
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        prefix = f"[rank {rank}] "
        self._outputs = (PrefixedOutput(out, prefix, "stdout"), PrefixedOutput(err, prefix, "stderr"))
        # The kernel's parent-death signal follows the thread that started the process: only the main one lasts.
        self._dies_with_thread = threading.current_thread() is threading.main_thread()

    def greet(self, store_port: int) -> None:
        """Let the new process become a rank. It answers when it is ready."""
        self.send(Hello(self._preparation, self._threads, os.getpid(), self._dies_with_thread, store_port))

    def send(self, head: object, body: Buffer = b"") -> None:
        """Queue a message, and forget the reply to the one before."""
        self._reply = None
        self._outbox += [memoryview(piece) for piece in frame(head, body) if len(piece)]

    @property
    def reply(self) -> tuple[Reply, Buffer] | None:
        """What the rank answered to the last message, once it is there."""
        if self._reply is None and not self._too_late:
            self._reply = self._inbox.take()
        return self._reply

    @property
    def exitcode(self) -> int | None:
        """Exit code of the process, negative for a signal; ``None`` while it lives."""
        return self._process.returncode

    def has_ended(self) -> bool:
        """Whether the process is gone, and all that it sent and printed has been read."""
        if self._process.poll() is None:
            return False
        while self._receive():
            pass
        self._control.close()
        self._stacks.close()
        for output in self._outputs:
            output.close()
        return True

    def flush_output(self) -> None:
        """Write out what the rank has printed until now."""
        for output in self._outputs:
            output.flush()

    def ask_where_it_stands(self) -> None:
        """Signal the rank to write its stacks. A reply that is not here by now came too late and is never read."""
        self._too_late = self.reply is None
        self._stacks.expect()
        self._process.send_signal(stacks.SIGNAL)

    def has_told_where(self) -> bool:
        """Whether the stacks are here, or the process is gone."""
        return self._stacks.have_come() or self.has_ended()

    def where_it_stood(self) -> str:
        """The stacks that it was asked for, in words, or that there are none."""
        if told := str(self._stacks):
            return f"rank {self.rank} stood here, innermost call last:\n{told}"
        return f"rank {self.rank} did not answer {stacks.SIGNAL.name} with its stacks, as one that is stopped cannot"

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Tell a selector what to wait for; the data of each key is the function to call then."""
        if self._control.fileno() >= 0:
            writing = selectors.EVENT_WRITE if self._outbox else 0
            selector.register(self._control, selectors.EVENT_READ | writing, self._exchange)
        for output in self._outputs:
            if not output.pipe.closed:
                selector.register(output.pipe, selectors.EVENT_READ, lambda _, output=output: output.drain())

    def _exchange(self, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._receive()
        if events & selectors.EVENT_WRITE:
            self._transmit()

    def _receive(self) -> bool:
        """Read once, and close the socket at its end. False where nothing was there."""
        if self._control.fileno() < 0:
            return False
        try:
            piece = self._control.recv(RECV_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            piece = b""
        if not piece:
            self._control.close()
        self._inbox.feed(piece)
        return bool(piece)

    def _transmit(self) -> None:
        try:
            sent = self._control.send(self._outbox[0])
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()  # the rank is gone, and has_ended() will say so
            return
        self._outbox[0] = self._outbox[0][sent:]
        if not self._outbox[0]:
            del self._outbox[0]


def preparation_for(rank: int) -> dict[str, Any]:
    """What multiprocessing's spawn method tells a child about its parent's script, in a form that pickles."""
    preparation = spawn.get_preparation_data(f"rank-{rank}")
    preparation["authkey"] = bytes(multiprocessing.current_process().authkey)
    script = preparation.get("init_main_from_path")
    if script is not None and not os.path.exists(script):  # a script that was read from standard input
        del preparation["init_main_from_path"]
    return preparation


def pump(ranks: Sequence[RankProcess], done: Callable[[RankProcess], bool], deadline: float) -> list[RankProcess]:
    """Move bytes to and from all ranks until each is done, or until the deadline on ``time.monotonic()``.

    Returns:
        Those that were not done in time.
    """
    while waiting := [rank for rank in ranks if not done(rank)]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return waiting
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                rank.register(selector)
            for key, events in selector.select(min(left_s, TICK_S)):
                key.data(events)
    return []


def ask_where_they_stand(ranks: Sequence[RankProcess]) -> None:
    """Get the stacks of ranks that ran out of time. One that does not answer is not waited for long."""
    for rank in ranks:
        rank.ask_where_it_stands()
    pump(ranks, RankProcess.has_told_where, time.monotonic() + stacks.WAIT_S)


def end(ranks: Collection[RankProcess], *, grace_s: float = 0.0) -> None:
    """End processes and wait for their end: SIGTERM first where ``grace_s`` leaves time for it, then SIGKILL."""
    left = list(ranks)
    if grace_s > 0:
        for rank in left:
            rank.terminate()
        left = pump(left, RankProcess.has_ended, time.monotonic() + grace_s)
    for rank in left:
        rank.kill()
    pump(left, RankProcess.has_ended, time.monotonic() + KILL_GRACE_S)
