"""What this host's process table says of another rank's process. Of ranks on other hosts it says nothing."""

from __future__ import annotations

import os
from typing import Any

ENDED, STOPPED = "its process has ended", "its process is stopped"


def identity() -> dict[str, Any]:
    """This process, for its peers: JSON values."""
    return {"host": _host(), "pid": os.getpid(), "born": _process(os.getpid())[1]}


def seen(person: dict[str, Any]) -> str:
    """ENDED, STOPPED, or "" for a process that runs, or that cannot be seen from here.

    Args:
        person: what :func:`identity` returned there.
    """
    if not _host() or person["host"] != _host():
        return ""
    try:
        state, born = _process(person["pid"])
    except OSError:
        return ""
    if born != person["born"] or state in "ZX":
        return ENDED
    return STOPPED if state in "Tt" else ""


def _host() -> str:
    """What two processes share if they see each other's process ids; empty where it cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as text:
            return f"{text.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; ``("X", "")`` if there is none.

    Raises:
        OSError: it cannot be seen, as by a process that has no file descriptor left.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as text:
            fields = text.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    return fields[0], fields[19]
