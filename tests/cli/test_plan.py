"""`moefleet plan`: tables, JSON, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moefleet.cli import app
from tests.plan.folders import DEEPSEEK, SMALL, write_config, write_weights

SIZES = ("--experts", "8", "--topk", "2", "--hidden", "64", "--intermediate", "32", "--layers", "2")


def plan(*options: str) -> Any:
    return CliRunner().invoke(app, ["plan", *options], env={"COLUMNS": "160"})


def test_tables(tmp_path: Path) -> None:
    result = plan("--model", str(write_config(tmp_path, DEEPSEEK)), "--world", "64", "--memory", "140")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for text in (
        "deepseek_v3 on 64 ranks: 256 experts, top-8, hidden 7168",
        "58 of 61 layers are MoE",
        "653.9 B parameters in experts, about 17.1 B in all else",
        "ranks 0-63 4 each: 0-255 19.0 GiB 31.9 GiB 50.9 GiB",
        "rows to a peer",
        "Fleet memory on each rank",
        "decode 128 expert_major, rank_major: up to 128 sequences",
        "algorithm=EpAlgorithm.LOW_LATENCY, layout=EpLayout.EXPERT_MAJOR, max_topk=8)",
        "Weights are stored as fp8",
    ):
        assert text in words, text
    assert "warning" not in words


def test_json_with_weights_from_headers(tmp_path: Path) -> None:
    write_config(tmp_path, SMALL)
    experts = {f"layers.0.mlp.experts.{e}.w.weight": [8, 8] for e in range(3)}
    write_weights(tmp_path / "model.safetensors", {**experts, "embed.weight": [10]})
    result = plan("--model", str(tmp_path), "--world", "2", "--tokens", "5", "--layout", "flat", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["weights_from"] == "checkpoint"
    assert [(r["count"], r["expert_bytes"], r["dense_bytes"]) for r in found["ranks"]] == [(2, 256, 20), (1, 128, 20)]
    (flat,) = found["layouts"]
    assert (flat["layout"], flat["fleet_params"]["max_tokens_per_rank"]) == ("flat", 5)
    assert flat["traffic"]["combine_bytes"] < flat["traffic"]["dispatch_bytes"]
    assert {"transport", "fits", "here", "reason", "memory"} <= flat["transports"][0].keys()


def test_sizes_instead_of_a_model() -> None:
    result = plan(*SIZES, "--world", "4", "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["model"]["moe_layers"], found["model"]["dtype"]) == (2, "float32")
    assert [r["expert_bytes"] for r in found["ranks"]] == [2 * 2 * 3 * 64 * 32 * 4] * 4


def test_rows_that_no_transport_carries() -> None:
    result = plan(*SIZES, "--world", "4", "--dtype", "float8")
    assert result.exit_code == 0, result.output
    assert "no: shm: dtype_bytes: got 1, allowed 2 or 4" in result.output


def test_what_does_not_fit_is_a_warning() -> None:
    sizes = ("--experts", "8", "--topk", "2", "--hidden", "1024", "--intermediate", "1024", "--layers", "2")
    result = plan(*sizes, "--world", "2", "--memory", "0.001")
    assert result.exit_code == 0, result.output
    warning = "warning: weights alone take 48.0 MiB on a rank, 1.0 MiB are available: use more ranks."
    assert result.output.count(warning) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no --model and no --experts --topk --hidden --intermediate --layers"),
        (SIZES[:8], "no --model and no --layers"),
        (("--model", "nowhere"), "--model: got nowhere, allowed a folder with a config.json"),
        (("--model", ".", *SIZES[:2]), "--experts: got given beside --model"),
        ((*SIZES, "--topk", "9"), "plan topk: got 9, allowed 1 to 8"),
        ((*SIZES, "--layout", "round"), "'round' is not one of"),
    ],
)
def test_errors(options: tuple[str, ...], said: str) -> None:
    result = plan("--world", "2", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_help_has_examples() -> None:
    result = plan("--help")
    for text in ("--model", "--tokens", "--memory", "Examples", "moefleet plan --model"):
        assert text in result.output
