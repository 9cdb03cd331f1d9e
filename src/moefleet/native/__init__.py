"""The compiled helper: a step's work on rows and routing, and experts of few rows, in C, where there is a compiler.

It is optional. Transports and kernels do the same in numpy and torch where the helper cannot be had, or
``MOEFLEET_NATIVE=0`` says that it is not wanted. ``routes.c`` (with ``slots.h``) and ``push.c`` hold the movements of
a step of shm, ``pages.c`` their memory, ``flags.c`` its commits, ``phases.c`` both in one call; ``bags.c`` is about
rows of any table; ``rows.c`` copies, sums; ``experts.c`` is what experts make of few rows. ``build.py`` compiles them
once into the user's cache folder; ``structs.py`` mirrors what C and Python share.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from .build import CannotBuild, load
from .structs import CALL, READ, FleetStruct, InboxStruct, PartStruct, SentStruct

__all__ = [
    "CALL",
    "READ",
    "FleetStruct",
    "InboxStruct",
    "PartStruct",
    "SentStruct",
    "Status",
    "library",
    "status",
]

SWITCH = "MOEFLEET_NATIVE"


@dataclass(frozen=True)
class Status:
    """Whether the helper is in use.

    Attributes:
        available: whether it was loaded.
        reason: why not; empty if it was.
        path: the library, where there is one.
    """

    available: bool
    reason: str = ""
    path: Path | None = None


_found: tuple[ctypes.CDLL | None, Status] | None = None
_finding = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The helper, or ``None`` where there is none. Found, or compiled in about a second, with the first call."""
    return _find()[0]


def status() -> Status:
    """Whether the helper is in use, and why not. Finds or compiles it as :func:`library` does."""
    return _find()[1]


def _find() -> tuple[ctypes.CDLL | None, Status]:
    global _found
    if os.environ.get(SWITCH) == "0":
        return None, Status(False, f"{SWITCH}=0 is set")
    with _finding:
        if _found is None:
            try:
                made, path = load()
                _found = made, Status(True, path=path)
            except CannotBuild as error:
                _found = None, Status(False, str(error))
        return _found
