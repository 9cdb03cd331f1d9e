"""Run scripts as ``python FILE`` would, each in a fork of one interpreter that has loaded torch and transformers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.running import ROOT, Ended

START_S = 100.0

# A fork goes on behind the loop, runs its script, and ends as any interpreter does. Nothing of moefleet is loaded.
PROGRAM = """\
import gc, os, runpy, sys
import torch, transformers.integrations.moe, transformers.models.qwen3_moe.modeling_qwen3_moe
gc.freeze()
for line in sys.stdin:
    script, log = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
os.setsid()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
os.dup2(1, 2)
sys.argv, sys.path[0] = [script], os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


class Interpreter:
    """The side of the tests. Use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip

    def run(self, script: Path, log: Path, timeout_s: float = 120) -> Ended:
        """Run a script at the root of the repository with src on Python's path. Its output goes over the file ``log``.

        When time is over, it ends with all processes that it started.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{script}\t{log}\n".encode())
        pid = self._told(START_S)
        assert pid is not None, "the interpreter did not start"
        code: int | str | None = self._told(timeout_s)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            self._told(START_S)
            code = f"no result after {timeout_s:g} s"
        return Ended(code, log.read_text(errors="replace"))

    def _told(self, timeout_s: float) -> int | None:
        """The next number that the interpreter writes, None if none comes in time."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        return int(self._process.stdout.readline()) if ready else None

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.__exit__(kind, error, at)
