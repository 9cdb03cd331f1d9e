"""Records, table and picture from times made up for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moefleet.bench.cases import CommCase, payload
from moefleet.bench.comm import CaseResult, CommPlan
from moefleet.bench.plot import plot, require_plot
from moefleet.bench.records import CommRecord, Record, to_json
from moefleet.bench.report import headline, records, tables
from moefleet.errors import MoEEpConfigError, MoEEpNotBuiltError

CASE = CommCase(world=2, tokens=4, hidden=16, experts=8, topk=2)
PLAN = CommPlan([CASE], steps=50, rounds=2, threads=1)


def made_up(*microseconds: float) -> np.ndarray:
    """100 steps whose dispatch took this long, combine twice and both three times that long, but one 10 times that."""
    one = np.array([[1.0, 2.0, 3.0]]) * microseconds[0] * 1e-6
    return np.concatenate([np.repeat(one, 97, 0), np.repeat(10 * one, 3, 0)])


def result(**errors: float) -> CaseResult:
    seconds = {"shm": made_up(10), "other": made_up(40), "gloo-raw": made_up(20)}
    return CaseResult(CASE, seconds, {"nvlink": "no GPU"}, errors)


@pytest.fixture
def found() -> list[Record]:
    return records(PLAN, result(shm=0.5, other=float("nan")))


def test_records_hold_medians_percentiles_and_ratios(found: list[Record]) -> None:
    assert [(r.transport, r.phase, r.median_us, r.ratio_to_first, r.ratio_to_gloo_raw) for r in found] == [
        ("shm", "dispatch", 10.0, 1.0, 0.5),
        ("shm", "combine", 20.0, 1.0, 0.5),
        ("shm", "both", 30.0, 1.0, 0.5),
        ("other", "dispatch", 40.0, 4.0, 2.0),
        ("other", "combine", 80.0, 4.0, 2.0),
        ("other", "both", 120.0, 4.0, 2.0),
        ("gloo-raw", "dispatch", 20.0, 2.0, 1.0),
        ("gloo-raw", "combine", 40.0, 2.0, 1.0),
        ("gloo-raw", "both", 60.0, 2.0, 1.0),
    ]
    assert found[0].p99_us == pytest.approx(100.0)
    assert [r.bytes for r in found[:3]] == [payload(CASE)[phase].mean for phase in ("dispatch", "combine", "both")]
    assert {r.steps for r in found} == {100}
    assert [r.valid for r in found[::3]] == [True, False, None]
    assert result(shm=0.5, other=float("nan"), third=1.5).wrong.keys() == {"other", "third"}


def test_without_the_yardstick_there_is_no_ratio_to_it() -> None:
    bare = CaseResult(CASE, {"shm": made_up(10)}, {})
    assert {r.ratio_to_gloo_raw for r in records(PLAN, bare)} == {None}


def test_json_is_a_list_of_flat_objects(found: list[Record]) -> None:
    read = json.loads(to_json(found))
    assert CommRecord(**read[0]) == found[0]
    assert read[0]["host"].keys() >= {"cpu", "cores", "torch", "date"}


def test_the_table_fits_a_narrow_terminal(found: list[Record]) -> None:
    console = Console(width=80, record=True, file=sys.stderr)
    console.print(headline(found[0]))
    for table in tables(found):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    moved = f"{payload(CASE)['both'].mean / 1e6:.2f}"
    assert ["4", "shm", "10", "20", "30", "300", moved, "2.00×"] in lines
    assert ["other", "WRONG", "40", "80", "120", "1200", moved, "0.50×"] in lines


def test_the_picture(found: list[Record], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("plot.png", "plot.svg"):
        require_plot(tmp_path / name)
        plot(found, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "expert_major" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("name", ["plot.txt", "plot", "nowhere/plot.png"])
def test_a_picture_that_cannot_be_written_is_refused_early(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(MoEEpConfigError, match="--plot"):
        require_plot(tmp_path / name)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MoEEpNotBuiltError, match=r"pip install 'moefleet\[plot\]'"):
        require_plot(tmp_path / "plot.png")
