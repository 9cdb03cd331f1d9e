"""How far each rank is: small datagrams to the parent. One that is lost is made good by the next."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

HOST = "127.0.0.1"
NOTE = struct.Struct("!HI")  # rank, forwards done
LISTEN_S = 0.1


class Beacon:
    """A rank's side. It never waits and never fails.

    Args:
        rank: this rank.
        port: the listener's; 0 for none.
    """

    def __init__(self, rank: int, port: int) -> None:
        self._rank, self._port, self._done = rank, port, -1
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def step(self) -> None:
        """Say that this rank is ready (the first call), then after each forward that it is done."""
        self._done += 1
        if self._port:
            with contextlib.suppress(OSError):
                self._socket.sendto(NOTE.pack(self._rank, self._done), (HOST, self._port))

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()


class Listener:
    """The parent's side: a context manager with a thread.

    Args:
        world_size: ranks that report.
        on_note: called from the thread with the number of ranks that are ready, and the forwards of all ranks.
    """

    def __init__(self, world_size: int, on_note: Callable[[int, int], None]) -> None:
        self._done: list[int | None] = [None] * world_size
        self._on_note = on_note
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((HOST, 0))
        self._socket.settimeout(LISTEN_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="moefleet-demo-progress", daemon=True)

    @property
    def port(self) -> int:
        """For :class:`Beacon`."""
        port: int = self._socket.getsockname()[1]
        return port

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                note = self._socket.recv(64)
            except TimeoutError:
                continue
            if len(note) != NOTE.size:
                continue
            rank, done = NOTE.unpack(note)
            if rank < len(self._done):
                self._done[rank] = done
                here = [count for count in self._done if count is not None]
                self._on_note(len(here), sum(here))

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()
