"""The kernels compile for a GPU, not for the interpreter alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = ["EXPERT_MAJOR", "RANK_MAJOR", "FLAT"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU the kernels themselves run")
def test_kernels_compile(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.transports.nvlink.compiling", *LAYOUTS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{what} compiles" for what in ("encoding", *LAYOUTS)]
