"""What a Fleet leaves in a process, on the machine, and behind when its process is killed."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

NAME = "memfd:moefleet"


def segments(process: int | str = "self") -> set[str]:
    """Inodes of our segments that a process has mapped."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:  # gone, or not ours
        return set()
    return {line.split()[4] for line in lines if NAME in line}


def descriptors(process: int | str = "self") -> int:
    """Descriptors of our segments that a process has open."""
    count = 0
    for fd in Path(f"/proc/{process}/fd").iterdir():
        try:
            count += NAME in os.readlink(fd)
        except OSError:
            continue
    return count


def of_this_process() -> dict[str, int]:
    """Everything of a Fleet that could be left in this process."""
    gc.collect()
    return {
        "segments": len(segments()),
        "descriptors of segments": descriptors(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of than before. Less is no leak: threads and sockets of what ran earlier end at any time."""
    return {name: (before[name], count) for name, count in after.items() if count > before[name]}


def mapped_anywhere(inodes: set[str]) -> set[str]:
    """Those of these segments that some process still has mapped."""
    processes = [entry for entry in os.listdir("/proc") if entry.isdecimal()]
    return inodes & set().union(*(segments(int(process)) for process in processes))


def resident_bytes() -> int:
    """Private memory that this process holds (shared segments are counted apart)."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
