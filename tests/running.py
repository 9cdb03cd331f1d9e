"""Run a program that may start others, and leave none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Ended(NamedTuple):
    """How a program ended: exit status, or what happened instead, and all that it printed."""

    code: int | str
    output: str


def run(command: Sequence[str | Path], log: Path, *, env: dict[str, str], timeout_s: float = 120) -> Ended:
    """Run ``command`` at the root of the repository with src on Python's path. Its output goes over the file ``log``.

    When time is over, it ends with all processes that it started.
    """
    env = {**env, "PYTHONPATH": str(ROOT / "src")}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
    code: int | str
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = f"no result after {timeout_s:g} s"
    return Ended(code, log.read_text(errors="replace"))
