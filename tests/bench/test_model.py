"""`moefleet bench model` from command line to JSON: ranks and the unmodified model write the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moefleet.bench import model
from moefleet.bench.generation import ALONE, ModelCase
from moefleet.bench.model import ModelPlan, ModelResult, records
from moefleet.bench.records import ModelRecord
from moefleet.cli import app
from moefleet.config import BootstrapConfig
from moefleet.demo.job import MODEL
from moefleet.errors import MoEEpConfigError, MoEEpNotBuiltError, MoEEpUnknownBackendError
from moefleet.launch import RankResult
from tests.bench.pooled import Pooled

CASE = ModelCase(MODEL, world=2, batch=3, prompt_tokens=4, new_tokens=5)
RANKS_ONLY = ("route", "dispatch", "compute", "combine", "rest")


class Here:
    """This process, in place of the one that has the unmodified model."""

    def run(self, fn: Any, *args: Any, timeout_s: float) -> list[RankResult]:
        return [RankResult(0, fn(BootstrapConfig(1, 0), *args), None, 0)]


@contextmanager
def ranks_at_hand(world_size: int, *, threads_per_rank: int, preload: Sequence[str] = ()) -> Iterator[Any]:
    """The unmodified model runs here, and ranks are the shared ones; they have transformers."""
    assert threads_per_rank == (2 if world_size == 1 else 1), "as many threads as all ranks have, and one each"
    yield Here() if world_size == 1 else Pooled(world_size)


def test_ranks_write_what_one_process_does_and_both_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch 1 leaves a rank without prompts, batch 3 divides them unevenly."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(model, "ranks", ranks_at_hand)
    files = ("--json", str(tmp_path / "model.json"), "--plot", str(tmp_path / "model.svg"))
    small = ("--batch", "1,3", "--prompt-tokens", "4", "--new-tokens", "3", "--rounds", "2", "--threads", "1")
    result = CliRunner().invoke(app, ["bench", "model", *small, "--validate", *files], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    found = [ModelRecord(**record) for record in json.loads((tmp_path / "model.json").read_text())]
    for batch in (1, 3):
        phases: dict[str, list[str]] = {}
        for r in found:
            if r.batch == batch:
                phases.setdefault(r.transport, []).append(r.phase)
        assert phases == {ALONE: ["run", "prefill", "decode"], "shm": ["run", "prefill", "decode", *RANKS_ONLY]}
    for r in found:
        assert (r.valid, r.ratio_to_first) == (None, 1.0) if r.transport == ALONE else r.valid is True
        assert (r.threads, r.alone_threads, r.world, r.tokens) == (1, 2, 2, (r.batch + 1) // 2)
        if r.phase == "run":
            assert r.tokens_per_second == pytest.approx(r.batch * 3e6 / r.median_us, rel=0.01)
    assert "transformers" in result.stdout and "…" not in result.stdout
    assert (tmp_path / "model.svg").exists()


def test_each_rank_has_its_part_of_the_batch() -> None:
    prompts = CASE.prompts(256)
    assert prompts.shape == (3, 4)
    parts = [CASE.prompts(256, rank) for rank in range(2)]
    assert [part.tolist() for part in parts] == [prompts[:2].tolist(), prompts[2:].tolist()]
    assert replace(CASE, batch=1).prompts(256, 1).shape == (0, 4)


def made_up(wrong: int) -> ModelResult:
    alone, ranks = np.array([2e-3, 2e-3, 9e-3]), np.array([4e-3, 4e-3, 4e-3])
    seconds: dict[str, dict[str, Any]] = {
        ALONE: {"run": alone, "prefill": alone / 4, "decode": alone / 10},
        "shm": {"run": ranks, "prefill": ranks / 4, "decode": ranks / 10, "compute": ranks / 20},
    }
    return ModelResult(CASE, seconds, {"shm": wrong})


def test_ratios_are_to_the_unmodified_model() -> None:
    plan = ModelPlan([CASE], rounds=3, threads=1)
    found = {(r.transport, r.phase): r for r in records(plan, made_up(0))}
    assert found["shm", "run"].ratio_to_first == 2.0
    assert found["shm", "compute"].ratio_to_first == 1.0, "the only one with this phase"
    run = found["shm", "run"]
    assert isinstance(run, ModelRecord) and run.tokens_per_second == 3 * 5 / 4e-3
    assert (run.valid, found[ALONE, "run"].valid) == (True, None)
    assert plan.facts(CASE).keys() <= {field.name for field in fields(ModelRecord)}


def test_other_texts_are_told() -> None:
    result = made_up(2)
    assert result.complaints == ["shm, 2 ranks, flat, batch 3: 2 of 3 texts are not those of the unmodified model"]
    assert not made_up(0).complaints
    assert [r.valid for r in records(ModelPlan([CASE]), result) if r.transport == "shm"] == [False] * 4


def test_who_can_run_it() -> None:
    assert ModelPlan([CASE]).names(CASE) == [ALONE, "shm"]
    assert ModelPlan([CASE], ["torch_dist", "shm"]).names(CASE) == [ALONE, "torch_dist", "shm"]
    with pytest.raises(MoEEpUnknownBackendError, match="transport: got 'smh'"):
        ModelPlan([CASE], ["smh"]).names(CASE)
    with pytest.raises(MoEEpNotBuiltError, match="cannot run 2 ranks, flat, batch 3: nvlink: "):
        ModelPlan([CASE], ["shm", "nvlink"]).names(CASE)
    on_gpus = replace(CASE, device="cuda")
    with pytest.raises(MoEEpNotBuiltError, match="shm: it is for cpu tensors"):
        ModelPlan([on_gpus], ["torch_dist", "shm"]).names(on_gpus)


@pytest.mark.parametrize("field", ["batch", "prompt_tokens", "new_tokens"])
def test_bad_values_are_named(field: str) -> None:
    with pytest.raises(MoEEpConfigError, match=f"{field}: got 0, allowed at least"):
        replace(CASE, **{field: 0})
