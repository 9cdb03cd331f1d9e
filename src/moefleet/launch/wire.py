"""What a parent and its rank say to each other: small heads and large bodies, all plain pickle.

A frame is two lengths, a pickled head (one of the dataclasses below) and a body of bytes. Plain pickle writes a
tensor's values into the body; the pickler of ``multiprocessing`` would pass a handle of shared memory instead.
"""

from __future__ import annotations

import enum
import pickle
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

LENGTHS = struct.Struct("!QQ")
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Hello:
    """First words to a new rank. ``preparation`` is what multiprocessing's spawn method tells a child."""

    preparation: dict[str, Any]
    environment: dict[str, str]
    threads: int
    store_port: int


@dataclass(frozen=True)
class Call:
    """Run the body, a pickled ``(fn, args)``, with a store whose keys start with ``prefix``.

    After the ``last`` call the process ends, with fn's exit code.
    """

    rank: int
    world_size: int
    prefix: str
    timeout_s: float
    sys_path: list[str]
    last: bool


class Said(enum.Enum):
    """What a rank reports, and what the body then is."""

    READY = enum.auto()  # nothing
    RETURNED = enum.auto()  # the pickled value
    RAISED = enum.auto()  # the pickled exception, or nothing where it cannot be pickled
    UNUSABLE = enum.auto()  # the same; raised before fn began: the script, fn or an argument cannot be loaded here
    # of a nursery: ranks cannot be forked from it


@dataclass(frozen=True)
class Reply:
    """A rank's word to its parent. ``summary`` is the exception in one line, ``traceback`` as Python prints it."""

    said: Said
    summary: str = ""
    traceback: str = ""

    @property
    def exitcode(self) -> int:
        """Exit code of a process that ends after this."""
        return 0 if self.said in (Said.READY, Said.RETURNED) else 1


@dataclass(frozen=True)
class Fate:
    """What became of the ``number``-th process that was forked: it lives while there is no exit code."""

    number: int
    pid: int
    exitcode: int | None


def dumps(value: object) -> bytes:
    """Pickle by value. Raises whatever the value's own pickling raises."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def frame(head: object, body: Buffer = b"") -> tuple[bytes, Buffer]:
    """The two pieces that put a message on the wire; the body is not copied."""
    packed = dumps(head)
    return LENGTHS.pack(len(packed), len(body)) + packed, body


def read_frame(stream: BinaryIO) -> tuple[Any, bytes] | None:
    """Wait for the next ``(head, body)``; ``None`` when the other side is gone."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head_size, body_size = LENGTHS.unpack(lengths)
    head, body = stream.read(head_size), stream.read(body_size)
    return (pickle.loads(head), body) if len(body) == body_size else None


class Inbox:
    """Puts frames together from pieces as they arrive."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> None:
        self._data += piece

    def take(self) -> tuple[Any, Buffer] | None:
        """The next complete ``(head, body)``, or ``None``."""
        if len(self._data) < LENGTHS.size:
            return None
        head_size, body_size = LENGTHS.unpack_from(self._data)
        body_start = LENGTHS.size + head_size
        end = body_start + body_size
        if len(self._data) < end:
            return None
        data, self._data = self._data, self._data[end:]
        view = memoryview(data)
        return pickle.loads(view[LENGTHS.size : body_start]), view[body_start:end]
