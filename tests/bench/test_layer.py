"""`moefleet bench layer` from command line to JSON, on ranks, and the cases that it makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moefleet import reference
from moefleet.bench import comm, layers, records, shapes
from moefleet.bench.cases import GRAPH, ROUTINGS
from moefleet.bench.comm import CaseResult, CommPlan, candidates_for
from moefleet.bench.layers import LayerCase
from moefleet.bench.records import LayerRecord
from moefleet.bench.report import records as records_of
from moefleet.bench.report import tables
from moefleet.bench.shapes import SHAPES, find_shape, require_memory, scaled
from moefleet.cli import app
from moefleet.config import EpLayout
from moefleet.errors import MoEEpConfigError, MoEEpNotBuiltError
from moefleet.fleet import Capability
from tests.bench.pooled import pooled_ranks

CASE = LayerCase(world=2, tokens=3, hidden=16, experts=5, topk=2, intermediate=8)
RUN = ("--experts", "6", "--hidden", "32", "--intermediate", "16", "--tokens", "0,4", "--steps", "2", "--rounds", "2")


def bench_layer(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "layer", *arguments], env={"COLUMNS": "80"})


def test_every_phase_of_every_layout_is_timed_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(comm, "ranks", pooled_ranks)
    files = ("--json", str(tmp_path / "layer.json"), "--plot", str(tmp_path / "layer.svg"))
    result = bench_layer(*RUN, "--topk", "2", "--transport", "shm", "--validate", *files)
    assert result.exit_code == 0, result.output
    found = [LayerRecord(**record) for record in json.loads((tmp_path / "layer.json").read_text())]
    assert {(r.layout, r.tokens, r.phase) for r in found} == {
        (layout.value, tokens, phase) for layout in EpLayout for tokens in (0, 4) for phase in LayerCase.phases
    }
    assert len(found) == len(EpLayout) * 2 * len(LayerCase.phases)
    assert {(r.what, r.valid, r.steps, r.experts, r.topk, r.dtype) for r in found} == {
        ("layer", True, 4, 6, 2, "bfloat16")
    }
    for tokens in (0, 4):
        times = {r.phase: r.median_us for r in found if (r.layout, r.tokens) == ("flat", tokens)}
        assert all(0 < time <= times["total"] for time in times.values()), times
    assert "olmoe scaled (experts 6 of 64, topk 2 of 8, hidden 32 of 2048" in " ".join(result.stdout.split())
    assert "…" not in result.stdout
    assert "compute" in (tmp_path / "layer.svg").read_text()


def test_what_is_expected_is_the_reference() -> None:
    w13, w2 = (torch.stack(planes) for planes in zip(*map(CASE.expert, range(CASE.experts)), strict=True))
    for rank in range(2):
        expected, largest = CASE.expected(rank)
        for number in range(ROUTINGS):
            ids, weights = CASE.routed(rank, number)
            (y,) = reference.forward([CASE.x(rank)], [ids], [weights], w13, w2)
            torch.testing.assert_close(expected[number], y)
        assert 0 < largest < 20
    mine = CASE.weights(1)
    assert torch.equal(mine.w13, w13[3:]) and torch.equal(mine.w2, w2[3:])


class Doubled(torch.nn.Module):
    def forward(self, tensors: Any) -> torch.Tensor:
        return 2 * CASE.expected(0)[0][0].float()


def test_a_wrong_layer_is_told_from_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MoEEpLayer", lambda *args, **kwargs: Silent())
    candidate = layers.layer_candidate("shm", CASE, layers.BootstrapConfig(2, 0))
    candidate._layer = Doubled()
    error = candidate.prepare(0, validate=True)
    assert error is not None and error > 1
    assert candidate.prepare(0, validate=False) is None


class Silent:
    """Stands for a layer: captures forwards that give what is expected of rank 0."""

    def __init__(self) -> None:
        self.captures = 0

    def enable_timing(self) -> None:
        pass

    def capture(self, tensors: Any) -> Any:
        self.captures += 1
        return SimpleNamespace(replay=partial(CASE.expected(0)[0].__getitem__, self.captures - 1))


class Events:
    """Stands for torch.cuda.Event: each one is recorded 2 ms after the one before."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Events.now += 2.0
        self.at = Events.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Events) -> float:
        return end.at - self.at


def test_of_a_captured_layer_only_the_whole_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MoEEpLayer", lambda *args, **kwargs: Silent())
    monkeypatch.setattr(torch.cuda, "Event", Events)
    candidate = layers.layer_candidate("nvlink" + GRAPH, CASE, layers.BootstrapConfig(2, 0))
    assert [candidate.prepare(number, validate=True) for number in range(ROUTINGS + 1)] == [0.0] * (ROUTINGS + 1)
    times = candidate.step(3)
    assert times[-1] == 2e-3 and np.isnan(times[:-1]).all()

    monkeypatch.setattr(records, "host", lambda device: {"cpu": "a CPU", "device": device})
    plan = CommPlan([CASE], steps=1, rounds=1, threads=1, device="cuda")
    eager, captured = np.array([[1e-3, 1e-3, 1e-3, 1e-3, 4e-3]]), np.array([times])
    found = records_of(plan, CaseResult(CASE, {"nvlink": eager, "nvlink" + GRAPH: captured}, {}))
    assert [(r.transport, r.phase, r.ratio_to_first) for r in found[-2:]] == [
        ("nvlink", "total", 1.0),
        ("nvlink+graph", "total", 0.5),
    ]
    assert {(r.device, r.host["device"]) for r in found} == {("cuda", "cuda")}
    console = Console(width=80, record=True, file=StringIO())
    for table in tables(found):
        console.print(table)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["nvlink+graph", "2000", "2000", "2.00×"] in lines
    assert ["expert_major,", "2", "ranks", "of", "a", "GPU"] in lines


def test_on_gpus_what_can_be_captured_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "nvlink": Capability(True, features=frozenset({"graphs"})),
        "torch_dist": Capability(True),
        "shm": Capability(False, "it is for CPU tensors"),
    }
    monkeypatch.setattr(comm, "available_backends", lambda: tuple(told))
    monkeypatch.setattr(comm, "probe", lambda name, bootstrap, params: told[name])
    case = replace(CASE, dtype=torch.bfloat16)
    names, left_out = candidates_for(case, (), "cuda")
    assert names == ["nvlink", "nvlink+graph", "torch_dist"]
    assert left_out == {"torch_dist+graph": "its steps need the host in between", "shm": "it is for CPU tensors"}
    assert candidates_for(case, ["nvlink+graph"], "cuda") == (["nvlink+graph"], {})
    assert "in bfloat16 only" in candidates_for(CASE, (), "cuda")[1]["nvlink+graph"]
    with pytest.raises(MoEEpNotBuiltError, match=r"torch_dist\+graph: its steps need the host"):
        candidates_for(case, ["torch_dist+graph"], "cuda")
    with pytest.raises(MoEEpConfigError, match=r"transport: got 'nvlink\+graph'"):
        candidates_for(case, ["nvlink+graph"])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    config = dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, hidden_size=8)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(intermediate_size=24, num_hidden_layers=1)))
    yield tmp_path


def test_shapes_by_name_and_of_a_folder(folder: Path) -> None:
    assert find_shape("DeepSeek-V3").experts == 256
    assert {"mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "olmoe"} <= SHAPES.keys()
    shape = find_shape(str(folder))
    assert (shape.experts, shape.topk, shape.hidden, shape.intermediate) == (4, 2, 8, 24)
    assert scaled(shape, experts=4, topk=None) == (shape, "mixtral")
    small, name = scaled(shape, experts=2, topk=None)
    assert (small.experts, name) == (2, "mixtral scaled (experts 2 of 4)")
    assert scaled(shape, experts=1, topk=None)[1] == "mixtral scaled (experts 1 of 4, topk 1 of 2)"
    with pytest.raises(MoEEpConfigError, match=r"topk: got 2, allowed 1 to 1"):
        scaled(shape, experts=1, topk=2)
    with pytest.raises(MoEEpConfigError, match=r"--model: got 'no-such-model', allowed mixtral-8x7b, .* or a folder"):
        find_shape("no-such-model")


def test_what_does_not_fit_is_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "available_bytes", lambda: CASE.experts * CASE.expert_bytes)
    require_memory([CASE])
    with pytest.raises(MoEEpConfigError, match="scale it down with --experts"):
        require_memory([CASE, replace(CASE, experts=6)])
    gpu = SimpleNamespace(total_memory=3 * CASE.expert_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    require_memory([CASE], "cuda")
    with pytest.raises(MoEEpConfigError, match=r"for 4 experts of one layer, allowed .*, the memory of a GPU"):
        require_memory([replace(CASE, experts=7)], "cuda")
    with pytest.raises(MoEEpConfigError, match="intermediate: got 0"):
        replace(CASE, intermediate=0)


def test_records_have_all_that_a_case_says() -> None:
    assert CommPlan([CASE]).facts(CASE).keys() <= {field.name for field in fields(LayerRecord)}
