"""An interrupted run goes on where it stopped; nothing is measured twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moefleet.bench import matrix
from moefleet.bench.cases import CommCase
from moefleet.bench.comm import CaseResult, CommPlan
from moefleet.bench.notebook import Notebook
from moefleet.bench.records import Record, to_json
from moefleet.bench.report import records
from moefleet.cli import app
from moefleet.errors import MoEEpConfigError

ONE = CommCase(world=2, tokens=1, hidden=16, experts=8, topk=2)
CASES = [replace(ONE, world=world, tokens=tokens) for world in (2, 3) for tokens in (1, 4)]
PLAN = CommPlan(CASES, ["shm"], steps=2, rounds=3, threads=1)


class Measured:
    """Stands for ranks: remembers what it was asked for, and stops where it is told to."""

    def __init__(self, stop_before: CommCase | None = None, error: float = 0.5) -> None:
        self.cases: list[CommCase] = []
        self._stop_before, self._error = stop_before, error

    def __call__(self, plan: CommPlan, on_tick: Callable[[Any], None]) -> Iterator[CaseResult]:
        for case in plan.cases:
            if case == self._stop_before:
                raise KeyboardInterrupt
            self.cases.append(case)
            on_tick(case)
            errors = {"shm": self._error} if plan.validate else {}
            yield CaseResult(case, {"shm": np.full((6, 3), 1e-6)}, {"nvlink": "no GPU"}, errors)


def run(plan: CommPlan, notebook: Notebook, measured: Measured) -> matrix.Outcome:
    return matrix.run(plan, notebook, matrix.find(plan, notebook), measured, records)


def left(plan: CommPlan, notebook: Notebook) -> Sequence[CommCase]:
    return matrix.remaining(plan, matrix.find(plan, notebook)).cases


def measured_in(found: Sequence[Record]) -> list[tuple[int, int]]:
    return [(r.world, r.tokens) for r in found if r.phase == "both"]


def test_an_interrupted_run_goes_on_with_the_cases_that_are_left(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, Notebook(path), Measured(stop_before=CASES[2]))
    assert len(json.loads(path.read_text())) == 2 * 3
    notebook = Notebook(path, resume=True)
    assert left(PLAN, notebook) == CASES[2:]
    measured = Measured()
    outcome = run(PLAN, notebook, measured)
    assert measured.cases == CASES[2:]
    assert (outcome.reused, outcome.left_out, outcome.complaints) == (2, {("nvlink", "no GPU")}, [])
    assert measured_in(outcome.records) == [(2, 1), (2, 4), (3, 1), (3, 4)]
    assert path.read_text() == to_json(outcome.records)
    assert [entry.name for entry in tmp_path.iterdir()] == ["comm.json"], "nothing is left beside it"


def test_records_keep_the_order_of_the_cases_and_strangers_go(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    run(replace(PLAN, cases=CASES[2:]), Notebook(path), Measured())
    measured = Measured()
    outcome = run(replace(PLAN, cases=CASES[:3]), Notebook(path, resume=True), measured)
    assert measured.cases == CASES[:2]
    assert measured_in(outcome.records) == [(2, 1), (2, 4), (3, 1)]
    assert path.read_text() == to_json(outcome.records)


@pytest.mark.parametrize(
    "change", [{"rounds": 4}, {"threads": 2}, {"warmup": 1}, {"transports": ["shm", "gloo-raw"]}, {"validate": True}]
)
def test_what_was_measured_otherwise_is_measured_again(change: dict[str, Any]) -> None:
    notebook = Notebook()
    run(PLAN, notebook, Measured())
    assert not left(PLAN, notebook)
    assert left(replace(PLAN, **change), notebook) == CASES


def test_wrong_output_is_told_again_when_its_case_is_not_measured_again() -> None:
    notebook, plan = Notebook(), replace(PLAN, cases=CASES[:1], validate=True)
    first = run(plan, notebook, Measured(error=3.0))
    assert first.complaints == ["shm, 2 ranks, expert_major, 1 tokens: output is off by 3 times what rounding allows"]
    assert run(plan, notebook, Measured()).complaints == ["shm: wrong output in a case measured before"]


def test_without_resume_a_file_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    path.write_text("not JSON")
    assert Notebook(path).records == []
    with pytest.raises(MoEEpConfigError, match=r"--resume: got .*comm.json .*leave --resume away"):
        Notebook(path, resume=True)
    path.write_text('[{"what": "comm"}]')
    with pytest.raises(MoEEpConfigError, match="a file that this version wrote"):
        Notebook(path, resume=True)
    with pytest.raises(MoEEpConfigError, match=r"--json: got .* allowed a file in a folder that exists"):
        Notebook(tmp_path / "nowhere" / "comm.json")
    assert Notebook(tmp_path / "none.json", resume=True).records == []


def test_resume_needs_a_file() -> None:
    for arguments in (["--resume"], ["--resume", "--json", "-"]):
        result = CliRunner().invoke(app, ["bench", "comm", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert "--resume needs --json FILE" in result.output
