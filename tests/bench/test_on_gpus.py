"""`moefleet bench layer`, `bench model` and `generate` with a GPU for each of at most two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moefleet.bench.generation import ALONE
from moefleet.cli import app
from moefleet.config import EpLayout
from moefleet.demo.job import MODEL

GPUS = torch.cuda.device_count()
WORLD = str(min(2, GPUS))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]

SIZES = ("--experts", "8", "--topk", "2", "--hidden", "256", "--intermediate", "128", "--tokens", "0,5")
SHORT = ("--world", WORLD, "--device", "cuda", "--validate", "--rounds", "2", "--timeout", "100")


def bench(command: str, file: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records of a run."""
    result = CliRunner().invoke(app, ["bench", command, *SHORT, *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(file.read_text())
    assert {(r["device"], r["host"]["gpu"]) for r in found} == {("cuda", torch.cuda.get_device_name())}
    return found


def test_layers_are_right_eager_and_from_graphs(tmp_path: Path) -> None:
    found = bench("layer", tmp_path / "layer.json", *SIZES, "--steps", "2")
    layouts = {layout.value for layout in EpLayout}
    for name, phases in (("nvlink", 5), ("nvlink+graph", 1), ("torch_dist", 5)):
        mine = [r for r in found if r["transport"] == name]
        assert {(r["layout"], r["tokens"]) for r in mine} == {(layout, t) for layout in layouts for t in (0, 5)}
        assert len(mine) == len(layouts) * 2 * phases
        assert all(r["valid"] and r["median_us"] > 0 for r in mine)


def test_float32_experts_run_eager(tmp_path: Path) -> None:
    found = bench("layer", tmp_path / "layer.json", *SIZES, "--steps", "1", "--dtype", "float32")
    assert {r["transport"] for r in found} == {"nvlink", "torch_dist"} and all(r["valid"] for r in found)


def test_ranks_write_what_one_gpu_does(tmp_path: Path) -> None:
    small = ("--batch", "1,3", "--prompt-tokens", "4", "--new-tokens", "5", "--transport", "nvlink,torch_dist")
    found = bench("model", tmp_path / "model.json", *small)
    assert {r["transport"]: r["valid"] for r in found} == {ALONE: None, "nvlink": True, "torch_dist": True}
    assert {r["layout"] for r in found} == {"expert_major"}


def test_generate_writes_on_gpus() -> None:
    prompts = ("--prompt", "And the priest shall", "--prompt", "And Pharaoh", "--prompt", "In")
    short = ("--max-new-tokens", "8", "--max-tokens-per-rank", "8", "--dtype", "float32", "--json", "--timeout", "100")
    told = []
    for device in ("cuda", "cpu"):
        where = ("--device", device, "--world", WORLD)
        result = CliRunner().invoke(app, ["generate", "--model", str(MODEL), *prompts, *short, *where])
        assert result.exit_code == 0, result.output
        told.append(json.loads(result.stdout))
    on_gpu, on_cpu = told
    assert on_gpu["transport"] == "nvlink"
    assert [text["tokens"] for text in on_gpu["texts"]] == [text["tokens"] for text in on_cpu["texts"]]
    for rank in on_gpu["ranks"]:
        assert rank["predicted_bytes"] == rank["measured_bytes"]
