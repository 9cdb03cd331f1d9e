"""A process that imports what ranks need once and forks them, each of which would take seconds to start by itself."""

from __future__ import annotations

import gc
import itertools
import os
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

import torch

from .interpreter import environment_for, interpreter, module_path
from .process import PythonProcess, end
from .rank import answer, die_with
from .wire import Fate, Reply, Said, dumps, frame

ORDER = struct.Struct("!QQ")  # the number of a process; the signal that it shall get, or FORK
FORK = 1 << 32
DESCRIPTORS = 4  # of a process: see Start in interpreter.py
GPUS = ("/dev/nvidia", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # what has them open begins so
ORDER_S = 10.0  # until one that does not take orders gets no more
FOR_ITS_RANKS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals to a process group that ranks may answer, and that do not end the nursery before they have."""


class Nursery(PythonProcess):
    """The parent's side of it. All that it forked ends with it, and it ends with the parent.

    Args:
        threads: the size of OpenMP's and OpenBLAS's thread pools in each process that it forks.
        life: a module with ``serve(control, stream)``, which returns the exit code: what such a process does.
        ranks: those that wait for it, for the error where it does not start.
        preload: modules to import first; one that cannot be imported is left to the ranks.
        variables: of its environment, besides this process's.
    """

    def __init__(
        self,
        threads: int,
        life: str = "moefleet.launch.rank",
        ranks: Sequence[int] = (),
        preload: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self._numbers = itertools.count()
        self._fates: dict[int, Fate] = {}
        start = interpreter(environment_for(threads) | variables, __name__, life, *preload)
        super().__init__("nursery", start, dumps(module_path()), ranks)

    def can_fork(self) -> bool:
        """Whether it is safe, once it has started: there is nothing that a child would lack."""
        return self.reply is not None and self.reply[0].said is Said.READY

    def fork(self, control: int, out: int, err: int, stack_file: int) -> Forked:
        """Order a new process with these descriptors, which may be closed when this returns.

        Raises:
            OSError: they cannot be sent.
        """
        number = next(self._numbers)
        self.order(number, FORK, (control, out, err, stack_file))
        return Forked(self, number)

    def order(self, number: int, order: int, descriptors: Sequence[int] = ()) -> None:
        if self._control.fileno() < 0:
            return  # the nursery is gone, as the fate of its children will tell
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # likewise
            self._control.settimeout(ORDER_S)
            try:
                socket.send_fds(self._control, [ORDER.pack(number, order)], descriptors)
            finally:
                self._control.setblocking(False)

    def fate_of(self, number: int) -> Fate | None:
        """What is known of a process by now; ``None``: not yet forked."""
        is_gone = self.has_ended()
        if not is_gone:
            self._receive()
            for output in self._outputs:
                output.drain()
        while (report := self._inbox.take()) is not None:
            self._fates[report[0].number] = report[0]
        fate = self._fates.get(number)
        if is_gone and (fate is None or fate.exitcode is None):
            return Fate(number, fate.pid if fate else 0, -signal.SIGKILL)  # the kernel's, at its parent's end
        return fate

    def close(self) -> None:
        """End it, and with it all that it forked. Idempotent."""
        end([self])


class Forked:
    """A process of the nursery, as ``subprocess.Popen`` shows one. Only its parent, which reaps it, signals it."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        self._nursery, self._number, self._pid = nursery, number, 0
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """0 until it is known."""
        if not self._pid:
            self.poll()
        return self._pid

    def poll(self) -> int | None:
        if self.returncode is None and (fate := self._nursery.fate_of(self._number)) is not None:
            self._pid, self.returncode = fate.pid, fate.exitcode
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            self._nursery.order(self._number, sig)


# In its process.


def serve(control: socket.socket, stream: BinaryIO, life: str, *preload: str) -> int:
    """Fork, signal and reap as ordered. Returns in the forked processes only: the exit code of each."""
    import numpy.random  # here, as who only starts ranks has no need of it

    main = import_module(life).serve
    for name in preload:
        with suppress(ImportError):
            import_module(name)
    if has_threads() or has_open(*GPUS):
        why = "it has threads or open GPUs, which no forked process would have"
        return answer(stream, Reply(Said.UNUSABLE, why), b"").exitcode
    gc.freeze()
    found: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in FOR_ITS_RANKS}
    found[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    me, descriptors = os.getpid(), None
    with suppress(BrokenPipeError, ConnectionResetError):
        answer(stream, Reply(Said.READY), b"")
        descriptors = obey(control, stream, woken)
    if descriptors is None:
        os._exit(0)

    die_with(me)
    signal.set_wakeup_fd(-1)
    for number, handler in found.items():
        signal.signal(number, handler)
    stream.close()
    control.close()
    os.close(woken)
    os.close(wakes)
    mine, out, err, stack_file = descriptors
    places = {out: 1, err: 2, stack_file: int(sys.argv[2])}  # the last: where faulthandler writes already
    for descriptor, place in places.items():
        os.dup2(descriptor, place, inheritable=place < 3)
        os.close(descriptor)
    numpy.random.seed()  # as new interpreters differ; Python's own generator sees to it itself
    torch.default_generator.seed()
    control = socket.socket(fileno=mine)
    return int(main(control, control.makefile("rwb")))


def has_threads() -> bool:
    """Whether a forked process would lack threads. Those that end before any fork, as OpenBLAS's do, are no such."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, where there are
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(50):
        if len(os.listdir("/proc/self/task")) == 1:
            return False
        time.sleep(0.002)  # one that has been joined is listed for a moment longer
    return True


def has_open(*prefixes: str) -> bool:
    """Whether a file whose path begins so is open in this process: CUDA, once initialised, works in no forked one."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(prefixes):
                return True
    return False


def obey(control: socket.socket, stream: BinaryIO, woken: int) -> list[int] | None:
    """Do what is ordered until the parent is gone. In a forked process: its descriptors."""
    children: dict[int, int] = {}
    poll = select.poll()
    for descriptor in (control.fileno(), woken):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken in ready:
            os.read(woken, 1 << 16)
            reap(children, stream)
        if ready == {woken}:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, ORDER.size, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        number, order = ORDER.unpack(data)
        if order == FORK:
            try:
                pid = os.fork()
            except OSError as error:
                os.write(descriptors[2], f"there can be no further process: {error}\n".encode())
                tell(stream, Fate(number, 0, 1))
            else:
                if pid == 0:
                    return descriptors
                children[number] = pid
                tell(stream, Fate(number, pid, None))
            for descriptor in descriptors:
                os.close(descriptor)
        elif number in children:
            os.kill(children[number], order)


def reap(children: dict[int, int], stream: BinaryIO) -> None:
    for number, pid in list(children.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[number]
            tell(stream, Fate(number, pid, os.waitstatus_to_exitcode(status)))


def tell(stream: BinaryIO, fate: Fate) -> None:
    stream.write(b"".join(frame(fate)))
    stream.flush()
