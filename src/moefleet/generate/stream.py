"""New tokens on their way from the ranks to the parent: lines of JSON over a local socket.

A rank whose parent does not listen any more writes on without showing it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

HOST = "127.0.0.1"

OnTokens = Callable[[int, Sequence[int], bool], None]
"""Called with a prompt's number, its new tokens, and whether these are the last."""


class Sender:
    """A rank's side; ``port`` 0 sends nothing."""

    def __init__(self, port: int, secret: str) -> None:
        self._socket: socket.socket | None = None
        if port:
            with contextlib.suppress(OSError):
                self._socket = socket.create_connection((HOST, port), timeout=10.0)
            self._send(secret)

    def tokens(self, prompt: int, ids: Sequence[int], *, last: bool = False) -> None:
        """Say what was written."""
        self._send([prompt, list(ids), last])

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, value: object) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(json.dumps(value).encode() + b"\n")


class Receiver:
    """The parent's side: a context manager with a thread for each rank. ``on_tokens`` is called by one at a time."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.secret = secrets.token_hex(16)
        self._on_tokens, self._turn = on_tokens, threading.Lock()
        self._server = socket.create_server((HOST, 0))
        self._server.settimeout(0.1)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def port(self) -> int:
        """Where ranks connect."""
        return int(self._server.getsockname()[1])

    def __enter__(self) -> Receiver:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:  # ranks have ended, and with them their connections
            thread.join(timeout=5.0)
        self._server.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._server.accept()
                listener = threading.Thread(target=self._listen, args=(connection,), daemon=True)
                listener.start()
                self._threads.append(listener)

    def _listen(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            if json.loads(next(lines, b"0")) != self.secret:
                return
            for line in lines:
                prompt, ids, last = json.loads(line)
                with self._turn:
                    self._on_tokens(prompt, ids, last)
