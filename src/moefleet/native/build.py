"""Finding the helper in its cache folder, or compiling it into it: once for each source, compiler and processor."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .structs import declare

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
FOR_THIS_PROCESSOR = "-march=native"
"""Left out where the compiler refuses it."""
COMPILE_S = 90.0
LOCKED_S = 2 * COMPILE_S + 5.0
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CannotBuild(Exception):
    """Why there is no helper, in words."""


def load() -> tuple[ctypes.CDLL, Path]:
    """The helper, and where it lies.

    Raises:
        CannotBuild: no compiler, or what it made cannot be used.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CannotBuild(f"no C compiler: none of {', '.join(COMPILERS)} is on PATH")
    try:
        return _load_from(cache_folder(), compiler)
    except (OSError, RuntimeError, CannotBuild):  # no home, a full or read-only one, or nothing may be run from it
        pass
    with tempfile.TemporaryDirectory(prefix="moefleet-") as folder:  # what is loaded stays loaded
        try:
            return _load_from(Path(folder), compiler)
        except OSError as error:
            raise CannotBuild(f"neither the cache folder nor {folder} can hold it: {error}") from error


def cache_folder() -> Path:
    """Where helpers of this user are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moefleet"


def sources() -> list[Path]:
    """The C files that make the helper."""
    return sorted(HERE.glob("*.c"))


def key(compiler: str) -> str:
    """A name for what this compiler makes of the sources on this processor."""
    real = os.path.realpath(compiler)
    about = os.stat(real)
    parts = [real, str(about.st_size), str(about.st_mtime_ns), platform.machine(), _processor(), *FLAGS]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in [*sources(), *sorted(HERE.glob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _load_from(cache: Path, compiler: str) -> tuple[ctypes.CDLL, Path]:
    folder = cache / key(compiler)
    cache.parent.mkdir(parents=True, exist_ok=True)
    for each in (cache, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        _require_ours(each)
    path = folder / "moefleet.so"
    with contextlib.suppress(OSError):  # it is not there, or was cut off by a crash
        return _open(path), path
    with _alone_in(folder):
        with contextlib.suppress(OSError):  # somebody else made it meanwhile
            return _open(path), path
        _compile(compiler, path)
    return _open(path), path


def _open(path: Path) -> ctypes.CDLL:
    path.stat()  # a library that this process has loaded is found under its name even after it was removed
    return declare(ctypes.CDLL(str(path)))


def _require_ours(folder: Path) -> None:
    """What is loaded from here runs as this user, so nobody else may be able to write here, or to put another folder in
    its place."""
    about, above = folder.stat(), folder.parent.stat()
    if about.st_uid != os.geteuid() or about.st_mode & _OTHERS:
        raise OSError(f"{folder} is not this user's alone")
    if above.st_mode & _OTHERS and not above.st_mode & stat.S_ISVTX:
        raise OSError(f"{folder.parent} lets others rename what is in it")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time: the others wait, and find what it made. A process that ends lets go.

    Raises:
        OSError: one was at it for longer than a compiler may take.
    """
    end = time.monotonic() + LOCKED_S
    with open(folder / "lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        yield


def _compile(compiler: str, path: Path) -> None:
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", unfinished, *map(str, sources())]
        problem = _run([*command, FOR_THIS_PROCESSOR]) and _run(command)
        if problem:
            raise CannotBuild(problem)
        with open(unfinished, "rb") as made:
            os.fsync(made)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _run(command: list[str]) -> str:
    """What went wrong, or an empty string."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMPILE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} could not run: {error}"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return f"{command[0]} failed: {said[0] if said else done.returncode}" if done.returncode else ""


def _processor() -> str:
    """What -march=native goes by: the first processor's model and features."""
    try:
        with open("/proc/cpuinfo") as lines:
            about = lines.read().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in about if line.startswith(wanted))
