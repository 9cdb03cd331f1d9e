"""A new Python, started, and what it needs of this one: flags, environment, where its modules are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import spawn
from typing import Protocol

from . import stacks

# What a new interpreter runs, with the numbers of its socket and of its file for stacks, its parent's pid or 0, the
# module that has its serve(), and what else that takes. It needs the parent's sys.path to find this package.
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
from importlib import import_module
from moefleet.launch.rank import die_with
die_with(int(sys.argv[3]))
sys.exit(import_module(sys.argv[4]).serve(control, stream, *sys.argv[5:]))
"""


class Running(Protocol):
    """What a started process (``subprocess.Popen``) and a forked one have in common."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


Start = Callable[[int, int, int, int], Running]
"""Makes a process of four descriptors: its end of the socket, its stdout, its stderr, its file for stacks."""


def interpreter(environment: dict[str, str], module: str, *args: str) -> Start:
    """A new Python that runs ``serve(control, stream, *args)`` of a module.

    It expects its ``sys.path`` as the first pickle on the socket.
    """

    def start(control: int, out: int, err: int, stack_file: int) -> Running:
        # The kernel's parent-death signal follows the thread that started the process: only the main one lasts.
        lasts = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        return subprocess.Popen(
            [
                os.fsdecode(spawn.get_executable()),
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                *("-c", PROGRAM, str(control), str(stack_file), str(os.getpid() if lasts else 0), module, *args),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(control, stack_file),
            env=environment,
        )

    return start


def environment_for(threads: int) -> dict[str, str]:
    """The environment of a rank that starts now."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def module_path() -> list[str]:
    """Where a rank shall look for modules: as here, and where that says "" it means this directory."""
    return [entry or os.getcwd() for entry in sys.path]
