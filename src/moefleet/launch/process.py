"""The parent's side of a rank or of its nursery: the process, the socket to it, and what it prints."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MoEEpError, MoEEpTimeoutError
from . import stacks
from .interpreter import Start, environment_for, interpreter, module_path
from .output import PrefixedOutput
from .wire import Buffer, Hello, Inbox, Reply, dumps, frame

if TYPE_CHECKING:
    from .nursery import Nursery

TICK_S = 0.02  # how late the end of a process may be noticed when something else holds its socket open
TERM_GRACE_S = 1.0
KILL_GRACE_S = 10.0
RECV_BYTES = 1 << 20

P = TypeVar("P", bound="PythonProcess")


class PythonProcess:
    """A process of our own making. Nothing here blocks: :func:`pump` moves the bytes.

    Args:
        name: for messages, and for the prefix of its output.
        start: makes it.
        first: what it reads before any frame.
        ranks: those that wait for its start.

    Raises:
        OSError: the process or its pipes cannot be made.
    """

    def __init__(self, name: str, start: Start, first: bytes, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, ranks
        self._too_late = False
        self._inbox = Inbox()
        self._outbox: list[memoryview] = [memoryview(first)] if first else []
        self._reply: tuple[Reply, Buffer] | None = None
        with ExitStack() as ours, ExitStack() as theirs:
            self._stacks = stacks.Stacks()
            ours.callback(self._stacks.close)
            self._control, control = socket.socketpair()
            ours.enter_context(self._control)
            theirs.enter_context(control)
            ends = {}
            self._outputs = []
            for stream in ("stdout", "stderr"):
                reading, ends[stream] = os.pipe()
                theirs.callback(os.close, ends[stream])
                pipe = ours.enter_context(open(reading, "rb", buffering=0))
                self._outputs.append(PrefixedOutput(pipe, f"[{name}] ", stream))
            self._control.setblocking(False)
            self._process = start(control.fileno(), ends["stdout"], ends["stderr"], self._stacks.fileno())
            ours.pop_all()

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

    def how_it_ended(self) -> str:
        """The exit code in words: "was killed by SIGKILL (signal 9)"."""
        return in_words(self.exitcode)

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
            return f"{self.name} stood here, innermost call last:\n{told}"
        return f"{self.name} did not answer {stacks.SIGNAL.name} with its stacks, as one that is stopped cannot"

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

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


class RankProcess(PythonProcess):
    """A process that serves as one rank.

    Args:
        rank: its number.
        threads: size of torch's and OpenMP's thread pools in it.
        nursery: what forks it; ``None`` starts a new interpreter.

    Raises:
        OSError: the process or its pipes cannot be made.
    """

    def __init__(self, rank: int, threads: int, nursery: Nursery | None = None) -> None:
        self.rank, self._threads, self._nursery = rank, threads, nursery
        self._preparation, self._environment = preparation_for(rank), environment_for(threads)
        if nursery is not None:
            super().__init__(f"rank {rank}", nursery.fork, b"", [rank])
        else:
            start = interpreter(self._environment, "moefleet.launch.rank")
            super().__init__(f"rank {rank}", start, dumps(module_path()), [rank])

    def greet(self, store_port: int) -> None:
        """Let the new process become a rank. It answers when it is ready."""
        self.send(Hello(self._preparation, self._environment, self._threads, store_port))

    def how_it_ended(self) -> str:
        nursery = self._nursery
        if nursery is not None and nursery.exitcode is not None and self.exitcode == -signal.SIGKILL:
            return f"ended with the process that it was forked from, which {nursery.how_it_ended()},"
        return super().how_it_ended()


def in_words(exitcode: int | None) -> str:
    """What an exit code says: "was killed by SIGKILL (signal 9)"."""
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "an unnamed signal"
    return f"was killed by {name} (signal {-exitcode})"


def preparation_for(rank: int) -> dict[str, Any]:
    """What multiprocessing's spawn method tells a child about its parent's script, in a form that pickles."""
    preparation = spawn.get_preparation_data(f"rank-{rank}")
    preparation["authkey"] = bytes(multiprocessing.current_process().authkey)
    script = preparation.get("init_main_from_path")
    if script is not None and not os.path.exists(script):  # a script that was read from standard input
        del preparation["init_main_from_path"]
    return preparation


def pump(processes: Sequence[P], done: Callable[[P], bool], deadline: float) -> list[P]:
    """Move bytes to and from all processes until each is done, or until the deadline on ``time.monotonic()``.

    Returns:
        Those that were not done in time.
    """
    while waiting := [process for process in processes if not done(process)]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return waiting
        with selectors.DefaultSelector() as selector:
            for process in processes:
                process.register(selector)
            for key, events in selector.select(min(left_s, TICK_S)):
                key.data(events)
    return []


def wait_until_started(processes: Sequence[PythonProcess], within_s: float, deadline: float) -> None:
    """Wait until each has answered for the first time.

    Args:
        within_s: the time that there was until the deadline on ``time.monotonic()``.

    Raises:
        MoEEpTimeoutError: not in time.
        MoEEpError: one has ended instead.
    """
    late = pump(processes, lambda process: process.reply is not None or process.has_ended(), deadline)
    if late:
        ask_where_they_stand(late)
        ranks = sorted(rank for process in late for rank in process.ranks)
        told = [f"ranks {ranks} did not start within {within_s} s", *(process.where_it_stood() for process in late)]
        raise MoEEpTimeoutError("\n".join(told), ranks=ranks)
    for process in processes:
        if process.reply is None:
            raise MoEEpError(f"{process.name} {process.how_it_ended()} while it started; see its stderr")


def ask_where_they_stand(ranks: Sequence[PythonProcess]) -> None:
    """Get the stacks of processes that ran out of time. One that does not answer is not waited for long."""
    for rank in ranks:
        rank.ask_where_it_stands()
    pump(ranks, PythonProcess.has_told_where, time.monotonic() + stacks.WAIT_S)


def end(ranks: Collection[PythonProcess], *, grace_s: float = 0.0) -> None:
    """End processes and wait for their end: SIGTERM first where ``grace_s`` leaves time for it, then SIGKILL."""
    left = list(ranks)
    if grace_s > 0:
        for rank in left:
            rank.send_signal(signal.SIGTERM)
        left = pump(left, PythonProcess.has_ended, time.monotonic() + grace_s)
    for rank in left:
        rank.send_signal(signal.SIGKILL)
    pump(left, PythonProcess.has_ended, time.monotonic() + KILL_GRACE_S)
