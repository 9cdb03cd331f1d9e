"""On real GPUs: the checks of benchmarks/gpu/check_nvlink.py."""

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
    script = ROOT / "benchmarks" / "gpu" / "check_nvlink.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--world", str(world)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
