"""The file of stacks, and how they read."""

from __future__ import annotations

import os
import time

import pytest

from moefleet.launch import stacks
from moefleet.launch.stacks import Stacks, readable

THREADS = """\
Thread 0x00007f01 (most recent call first):
  File "/nowhere/threading.py", line 7 in wait
  File "/nowhere/work.py", line ??? in <lambda>

Current thread 0x00007f02 (most recent call first):
"""


def test_the_innermost_call_comes_last_and_with_its_source() -> None:
    text = THREADS + f'  File "{__file__}", line 1 in inner\n  File "<string>", line 11 in <module>\n  ...\n'
    assert readable(text).splitlines() == [
        "Thread 0x00007f01:",
        '  File "/nowhere/work.py", line ??? in <lambda>',
        '  File "/nowhere/threading.py", line 7, in wait',
        "",
        "Current thread 0x00007f02:",
        "  ...",
        '  File "<string>", line 11, in <module>',
        f'  File "{__file__}", line 1, in inner',
        '    """The file of stacks, and how they read."""',
    ]
    assert readable("") == ""


def test_stacks_have_come_when_no_more_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    file = Stacks()
    os.write(file.fileno(), b"those of an earlier signal\n")
    file.expect()
    now_s = 9.0
    assert not file.have_come(), "nothing yet"
    for line in (b"Thread 1:\n", b"  line\n"):
        os.write(file.fileno(), line)
        now_s += stacks.QUIET_S / 2
        assert not file.have_come()
    now_s += 2 * stacks.QUIET_S
    assert file.have_come()
    os.write(file.fileno(), b"  and the last\n")
    file.close()
    file.close()
    assert str(file) == "Thread 1:\n  and the last\n  line"


def test_without_files_in_memory_there_is_one_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    file = Stacks()
    assert os.fstat(file.fileno()).st_nlink == 0
    file.close()
