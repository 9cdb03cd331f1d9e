"""On real GPUs: the checks of benchmarks/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("world", [1, 2])
def test_checks_on_gpus(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs are needed, {torch.cuda.device_count()} are here")
    run("check_nvlink.py", "--quick", "--world", str(world))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA GPUs")
@pytest.mark.parametrize("part", ["two", "four"])
def test_faults_on_gpus(part: str) -> None:
    run("check_faults.py", "--only", part)


def run(script: str, *options: str) -> None:
    """A script of benchmarks/gpu; it has to end with 0."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / script), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
