"""Where a rank hangs: the Python stacks of its threads, which it writes into a file that its parent reads.

``faulthandler`` writes them in a signal handler, so a rank also answers from C code that holds the interpreter lock.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
import traceback
from typing import IO

SIGNAL = signal.SIGURG  # hardly used elsewhere, and a process that has no handler for it goes on
WAIT_S = 1.0  # for the stacks of all ranks together
QUIET_S = 0.2  # without a further line: nothing marks the end of what faulthandler writes

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
ORDER = " (most recent call first)"


class Stacks:
    """The file of one rank. It has no name, and is gone with the last process that has it open."""

    def __init__(self) -> None:
        self._file = unnamed_file()
        self._start = 0
        self._dump = b""
        self._changed_at = 0.0

    def fileno(self) -> int:
        return self._file.fileno()

    def expect(self) -> None:
        """Begin to wait for stacks: what is there already is no answer."""
        self._start, self._dump, self._changed_at = self._size(), b"", time.monotonic()

    def have_come(self) -> bool:
        """Whether stacks were written, and nothing more for a moment."""
        self._read()
        return bool(self._dump) and time.monotonic() - self._changed_at >= QUIET_S

    def close(self) -> None:
        """Read what has come, and let go of the file. Idempotent."""
        self._read()
        self._file.close()

    def __str__(self) -> str:
        """The stacks as tracebacks, with their source; empty if none have come. The main thread is the last."""
        return readable(self._dump.decode("ascii", "replace"))

    def _read(self) -> None:
        if self._file.closed:
            return
        dump = os.pread(self.fileno(), self._size() - self._start, self._start)  # the rank shares the file's position
        if dump != self._dump:
            self._dump, self._changed_at = dump, time.monotonic()

    def _size(self) -> int:
        return os.fstat(self.fileno()).st_size


def unnamed_file() -> IO[bytes]:
    """In memory where the system has such files, else on disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("moefleet-stacks"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def readable(dump: str) -> str:
    """What faulthandler wrote, with each thread's innermost call last and its lines of source."""
    threads = []
    for block in dump.strip("\n").split("\n\n"):
        head, *calls = block.split("\n")
        threads.append(head.replace(ORDER, "") + "\n" + "".join(map(with_source, reversed(calls))))
    return "\n".join(threads).strip("\n")


def with_source(call: str) -> str:
    match = FRAME.fullmatch(call)
    if match is None:
        return call + "\n"
    path, line, name = match.groups()
    return "".join(traceback.format_list([traceback.FrameSummary(path, int(line), name)]))
