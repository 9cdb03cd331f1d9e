"""Finding and compiling the helper: once, safely, and quietly without it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moefleet import native
from moefleet.native import build
from moefleet.native.build import CannotBuild, load
from tests.native.needs import needs_the_helper

FAST = ("-std=c11", "-O0", "-fPIC", "-shared")
"""What the machine code is like does not matter here."""


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and a helper that is yet to be found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setattr(build, "FLAGS", FAST)
    monkeypatch.setattr(native, "_found", None)
    yield tmp_path / "cache" / "moefleet"


def compiler_that(folder: Path, does: str, name: str = "cc") -> Path:
    """A script that takes a compiler's place on PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return folder


@needs_the_helper
def test_it_is_compiled_once_and_found_then(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.status().path
    assert path is not None and path.is_file() and path.parent.parent == apart
    for folder in (apart, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(each.name for each in path.parent.iterdir()) == ["lock", "moefleet.so"], "nothing half-made is left"
    made = path.stat().st_mtime_ns, path.stat().st_ino
    monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("it was there already"))
    assert load()[1] == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == made
    assert native.library() is native.library()


@needs_the_helper
def test_ranks_that_start_at_once_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: each opens the lock for itself, and so waits for the others."""
    monkeypatch.setattr(build, "FLAGS", (*FAST, "-g"))
    real, compiled = build._compile, []
    monkeypatch.setattr(build, "_compile", lambda *args: (compiled.append(args), real(*args)))
    with ThreadPoolExecutor(4) as threads:
        paths = {path for _, path in threads.map(lambda _: load(), range(4))}
    assert len(paths) == len(compiled) == 1
    assert sorted(each.name for each in paths.pop().parent.iterdir()) == ["lock", "moefleet.so"]


@needs_the_helper
def test_one_that_never_ends_compiling_holds_up_nobody_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.status().path
    assert path is not None
    path.unlink()
    monkeypatch.setattr(build, "LOCKED_S", 0.05)
    with build._alone_in(path.parent):
        assert load()[1].parent != path.parent


def test_other_sources_compilers_and_flags_are_other_helpers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = str(compiler_that(tmp_path / "bin", "exit 1") / "cc")
    keys = {build.key(one), build.key(str(compiler_that(tmp_path / "bin", "exit 2  # newer", "gcc") / "gcc"))}
    monkeypatch.setattr(build, "FLAGS", (*FAST, "-g"))
    keys.add(build.key(one))
    source = tmp_path / "rows.c"
    source.write_text("int moefleet;")
    monkeypatch.setattr(build, "HERE", tmp_path)
    keys.add(build.key(one))
    source.write_text("int other;")
    keys.add(build.key(one))
    assert len(keys) == 5


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(native, "load", lambda: pytest.fail("it is not wanted"))
    assert native.library() is None
    assert native.status() == native.Status(False, "MOEFLEET_NATIVE=0 is set")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.library() is None
    assert native.status().reason == "no C compiler: none of cc, gcc, clang is on PATH"


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, apart: Path) -> None:
    monkeypatch.setenv("PATH", str(compiler_that(tmp_path / "bin", "echo 'no such thing' >&2; exit 3")))
    assert native.library() is None
    assert native.status().reason.endswith("cc failed: no such thing")
    assert not list(apart.rglob("*.so")), "nothing half-made is left"


def test_a_compiler_that_makes_something_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What cannot be loaded, here because it is no library, is refused wherever it lies."""
    does = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    monkeypatch.setenv("PATH", f"{compiler_that(tmp_path / 'bin', does)}:{os.environ['PATH']}")
    assert native.library() is None
    assert "can hold it" in native.status().reason


@needs_the_helper
def test_a_processor_that_the_compiler_does_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FOR_THIS_PROCESSOR", "-march=no-such-thing")
    assert load()[1].is_file()


@needs_the_helper
@pytest.mark.parametrize("how", ["file", "others"])
def test_a_cache_folder_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, apart: Path, how: str) -> None:
    """The helper works all the same, and nothing is left of it on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(apart.parent / "other"))
    cache = build.cache_folder()
    if how == "file":
        cache.parent.mkdir(parents=True)
        cache.write_text("in the way")
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    library, path = load()
    assert library.moefleet_sizes(0) > 0
    assert not path.exists() and cache not in path.parents


@needs_the_helper
def test_one_that_was_cut_off_is_made_anew(apart: Path) -> None:
    """As after a crash of the machine: found, not loadable, replaced."""
    load_elsewhere = build.cache_folder() / build.key(build.shutil.which("cc") or "")
    load_elsewhere.mkdir(mode=0o700, parents=True)
    (load_elsewhere / "moefleet.so").touch(mode=0o700)
    for folder in (apart, load_elsewhere):
        folder.chmod(0o700)
    assert native.status().path == load_elsewhere / "moefleet.so"


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.declare.__globals__["CALLS"], "absent", (None, ()))
    with pytest.raises(CannotBuild, match="it has no moefleet_absent"):
        load()
