"""`moefleet bench comm` from command line to JSON, on ranks; and with transports that are wrong or absent."""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from moefleet.bench.cases import PHASES, CommCase, payload
from moefleet.bench.comm import CommPlan, candidates_for, values_of
from moefleet.bench.records import CommRecord
from moefleet.cli import app
from moefleet.config import EpLayout
from moefleet.errors import (
    MoEEpConfigError,
    MoEEpNotBuiltError,
    MoEEpPeerError,
    MoEEpTimeoutError,
    MoEEpUnknownBackendError,
)
from moefleet.fleet import available_backends, registry
from moefleet.launch import RankResult

SMALL = ("--world", "2", "--hidden", "16", "--experts", "8", "--topk", "2", "--steps", "3", "--rounds", "2")
CASE = CommCase(world=2, tokens=4, hidden=16, experts=8, topk=2)


def bench_comm(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "comm", *SMALL, *arguments], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run of everything; its output and the folder with its files."""
    pytest.importorskip("matplotlib")
    here = tmp_path_factory.mktemp("run")
    files = ("--json", str(here / "comm.json"), "--plot", str(here / "comm.png"))
    return bench_comm("--tokens", "0,1", "--tokens", "4", "--warmup", "1", "--validate", *files), here


@pytest.fixture(scope="module")
def found(run: tuple[Result, Path]) -> list[dict[str, Any]]:
    result, here = run
    assert result.exit_code == 0, result.output
    read: list[dict[str, Any]] = json.loads((here / "comm.json").read_text())
    return read


def test_records_are_complete(found: list[dict[str, Any]]) -> None:
    names = {field.name for field in fields(CommRecord)}
    assert all(record.keys() == names for record in found)
    asked = {(layout.value, tokens, phase) for layout in EpLayout for tokens in (0, 1, 4) for phase in PHASES}
    for transport in ("shm", "gloo-raw"):
        assert {(r["layout"], r["tokens"], r["phase"]) for r in found if r["transport"] == transport} == asked
    for record in found:
        assert (record["world"], record["hidden"], record["experts"], record["topk"]) == (2, 16, 8, 2)
        assert (record["steps"], record["rounds"], record["warmup"]) == (6, 2, 1)
        assert 0 < record["median_us"] <= record["p99_us"]
        assert record["valid"] is (None if record["transport"] == "gloo-raw" else True)
        assert record["host"]["torch"] == torch.__version__


def test_ratios_are_to_the_first_transport(found: list[dict[str, Any]]) -> None:
    assert found[0]["transport"] == "shm"
    for record in found:
        (first,) = [
            r
            for r in found
            if r["transport"] == "shm" and all(r[key] == record[key] for key in ("layout", "tokens", "phase"))
        ]
        assert first["ratio_to_first"] == 1
        assert record["ratio_to_first"] == pytest.approx(record["median_us"] / first["median_us"], rel=0.01)


def test_bytes_are_those_of_the_case(found: list[dict[str, Any]]) -> None:
    for record in found:
        moved = payload(CommCase(2, record["tokens"], 16, 8, 2))[record["phase"]]
        assert (record["bytes"], record["bytes_busiest_rank"]) == (moved.mean, moved.most)
        assert (record["bytes"] == 0) is (record["tokens"] == 0)


def test_a_table_for_people_and_a_picture(run: tuple[Result, Path]) -> None:
    result, here = run
    for text in ("expert_major", "rank_major", "flat", "gloo-raw", "vs gloo-raw", "2 ranks of 1 thread", "8 experts"):
        assert text in result.stdout
    assert (here / "comm.png").read_bytes().startswith(b"\x89PNG")


FAKES = """
from moefleet import CombineOutput
from moefleet.fleet import Capability
from moefleet.transports.shm import ShmFleet
from moefleet.transports.shm.handle import ShmHandle

class WrongHandle(ShmHandle):
    def combine(self, params):
        return CombineOutput(super().combine(params).x * 1.5)

class WrongFleet(ShmFleet):
    def create_handle(self, params, algo_knobs=()):
        return WrongHandle(self, params, algo_knobs)

class AbsentFleet(ShmFleet):
    @classmethod
    def probe(cls):
        return Capability(False, "no such cable [here]")
"""


def test_a_wrong_transport_is_found_and_an_absent_one_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are installed as another package would: ranks find them by entry point."""
    (tmp_path / "fakes.py").write_text(textwrap.dedent(FAKES))
    (tmp_path / "fakes-1.dist-info").mkdir()
    (tmp_path / "fakes-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fakes\nVersion: 1\n")
    (tmp_path / "fakes-1.dist-info" / "entry_points.txt").write_text(
        "[moefleet.transports]\nwrong = fakes:WrongFleet\nabsent = fakes:AbsentFleet\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_fleets", dict(registry._fleets))
    arguments = ("--transport", "absent,wrong", "--transport", "shm", "--layout", "flat", "--tokens", "4")
    result = bench_comm(*arguments, "--validate", "--combine-input", "tensor", "--dtype", "bfloat16", "--json", "-")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)  # and nothing else is there
    assert [(r["transport"], r["phase"]) for r in found] == [(name, p) for name in ("wrong", "shm") for p in PHASES]
    assert {r["valid"] for r in found[:3]} == {False}
    assert {r["valid"] for r in found[3:]} == {True}
    assert {(r["combine_input"], r["dtype"], r["ratio_to_gloo_raw"]) for r in found} == {("tensor", "bfloat16", None)}
    assert "not measured: absent: no such cable [here]" in result.stderr
    assert "error: wrong, 2 ranks, flat, 4 tokens: output is off by" in result.stderr
    assert "error: shm" not in result.stderr


def test_who_can_run_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    names, _ = candidates_for(CASE)
    assert names[-1] == "gloo-raw"
    assert set(names) <= {*available_backends(), "gloo-raw"}
    assert candidates_for(CASE, ["gloo-raw", "shm"]) == (["gloo-raw", "shm"], {})
    with pytest.raises(MoEEpUnknownBackendError, match=r"transport: got 'smh', allowed .*shm, .*gloo-raw"):
        candidates_for(CASE, ["smh"])
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(MoEEpNotBuiltError, match="gloo-raw: this build of torch has no gloo"):
        candidates_for(CASE, ["gloo-raw"])


def test_the_error_of_the_rank_that_failed_is_the_one_raised() -> None:
    errors = [
        RuntimeError("Connection closed by peer"),
        MoEEpPeerError("rank 2 failed", rank=2),
        MoEEpConfigError("the cause"),
        MoEEpTimeoutError("late", ranks=[2]),
    ]
    with pytest.raises(MoEEpConfigError, match="the cause"):
        values_of([RankResult(rank, None, error, 1) for rank, error in enumerate(errors)])
    assert values_of([RankResult(0, 7, None, 0)]) == [7]


@pytest.mark.parametrize("field", ["steps", "rounds"])
def test_a_plan_needs_steps(field: str) -> None:
    with pytest.raises(MoEEpConfigError, match=f"{field}: got 0, allowed at least 1"):
        CommPlan([CASE], **{field: 0})
