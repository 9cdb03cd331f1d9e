"""``moefleet chaos``: one round of each kind, what is reported, and that a wrong row is the exit status."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moefleet import reference
from moefleet.chaos import Fault, Kind, Plan, work
from moefleet.chaos import rounds as rounds_module
from moefleet.chaos.report import RoundReport, Totals, by_fault, markdown, quantile
from moefleet.chaos.supervisor import Supervisor
from moefleet.cli import app
from moefleet.cli import chaos as chaos_command

pytestmark = pytest.mark.timeout(200)


def chaos(*options: str) -> Any:
    return CliRunner().invoke(app, ["chaos", *options])


def test_a_kill_is_noticed_agreed_on_and_made_good() -> None:
    result = chaos("--world", "3", "--kill", "1", "--layout", "flat", "--timeout-ms", "20000", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["clean"] and report["rows"] > 100 and report["wrong"] == 0
    stages = [report[f"{name}_s"] for name in ("first_flag", "last_flag", "agreed", "degraded", "recovered")]
    assert stages == sorted(stages) and stages[0] > 0
    kinds = [moment["kind"] for moment in report["timeline"]]
    for kind, count in {"fault": 1, "flag": 2, "mask": 2, "degraded": 2, "moved": 2, "full": 3}.items():
        assert kinds.count(kind) == count, kinds


def test_a_stop_ends_in_readmission_and_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "stop.png"
    result = chaos("--world", "3", "--stop", "0", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "rank 0 learns that it was evicted" in result.stdout
    assert result.stdout.count("is back under [1, 1, 1]") == 3
    assert picture.stat().st_size > 1000


def supervisor() -> Supervisor:
    """One that has started nothing."""
    store: Any = SimpleNamespace(port=0)
    nursery: Any = None
    watching = Supervisor(nursery, store, "", Plan(2, (Fault(Kind.KILL, 1),)), lambda _: None)
    watching.fault_at = 0.0
    return watching


def event(kind: str, rank: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "t": 1.0, "generation": 0, "step": 5, "epoch": 1, "mask": [1, 0], **more}


def test_a_wrong_row_is_counted_and_shown() -> None:
    watching = supervisor()
    watching._see(event("step", 0, rows=3, wrong=2))
    assert watching.report.unsafe and watching.report.wrong == 2
    assert any("2 WRONG rows" in moment.what for moment in watching.report.timeline)


@pytest.mark.parametrize("kind", ["agreed", "step", "readmitted"])
def test_ranks_that_disagree_are_found(kind: str) -> None:
    watching = supervisor()
    watching._see(event(kind, 0, rows=3, wrong=0))
    assert not watching.report.unsafe
    watching._see(event(kind, 1, rows=3, wrong=0, mask=[1, 1]))
    assert watching.report.unsafe and "rank 1 holds [1, 1]" in watching.report.disagreements[0]


def test_a_healthy_rank_that_ends_is_an_error_and_one_that_was_evicted_is_counted() -> None:
    watching = supervisor()
    watching._see(event("gone", 0))
    watching._see(event("evicted", 0))
    assert watching.report.errors == ["rank 0 ended"] and watching.report.evicted_healthy == 1


@pytest.mark.parametrize(
    "what", [{"wrong": 1}, {"disagreements": ["x"]}, {"hangs": ["x"]}, {"leaked": ["x"]}, {"errors": ["x"]}]
)
def test_what_may_never_happen_is_the_exit_status(what: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_command, "_one", lambda *_: RoundReport("kill 1", **what))
    result = chaos("--kill", "1")
    assert result.exit_code == 1 and "NOT as it must be" in result.stdout
    assert chaos("--kill", "1", "--json").exit_code == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kill", "9"], "ranks 0 to 3"),
        (["--recovery", "hope"], "replace, shrink, none"),
        (["--random", "1", "--kill", "1"], "no --kill"),
        (["--plot", "x.nothing"], "a file name that ends in"),
        (["--world", "2", "--kill", "0,1"], "fewer than the 2 ranks"),
    ],
)
def test_bad_options_say_what_is_allowed(options: list[str], told: str) -> None:
    result = chaos(*options)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_random_rounds_go_on_from_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, table = tmp_path / "rounds.jsonl", tmp_path / "table.md"
    options = ("--random", "5", "--world", "3", "--timeout-ms", "300", "--state", str(state))
    first = chaos(*options, "--rounds", "2", "--json")
    assert first.exit_code == 0, first.output
    with state.open("a") as lines:
        lines.write('{"number": 2, "cut off')  # the run was ended while it wrote
    second = chaos(*options, "--rounds", "3", "--markdown", str(table))
    assert second.exit_code == 0, second.output
    kept = [json.loads(line) for line in state.read_text().splitlines()[1:3]]
    assert kept == json.loads(first.stdout)["rounds"]
    assert "| 3 |" in table.read_text()

    def nothing_to_run(*_: object) -> None:
        raise AssertionError("all rounds are in the file")

    monkeypatch.setattr(rounds_module, "warm_nursery", nothing_to_run)
    assert chaos(*options, "--rounds", "2").exit_code == 0
    refused = chaos("--random", "6", "--world", "3", "--state", str(state))
    assert refused.exit_code == 2 and "name another file" in " ".join(refused.stderr.split())


def test_the_check_of_rows_finds_nan_and_small_differences() -> None:
    step = next(step for step in range(1, 99) if len(work.inputs(0, step, 1)[0]) >= 2)
    x, ids, weights = work.inputs(0, step, 1)
    parts = [(x[:0], ids[:0], weights[:0]), (x, ids, weights)]
    xs, all_ids, all_weights = ([part[i] for part in parts] for i in range(3))
    right = reference.forward(xs, all_ids, all_weights, *work.all_weights(), dtype=torch.float32)[1]
    assert right is not None and work.wrong_rows(0, step, 1, [1, 1], right) == 0
    right[0, 0] = math.nan
    right[1, 3] += 1e-2
    assert work.wrong_rows(0, step, 1, [1, 1], right) == 2


def test_tables_count_and_group() -> None:
    rounds = []
    for number in range(4):
        report = RoundReport("kill 1", rows=10, fault="kill" if number else "stop", last_flag_s=0.001 * number)
        report.hangs = ["rank 3"] * (number == 2)
        rounds.append(report.as_json())
    totals = Totals.of(rounds)
    assert (totals.rounds, totals.rows, totals.hangs) == (4, 40, 1)
    assert by_fault(rounds, "last_flag_s") == {"kill": [0.001, 0.002, 0.003], "stop": [0.0]}
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([1.0], 0.95) == 1.0
    assert "| kill | last rank's flag | 3 | 2.0 | 3.0 | 3.0 |" in markdown(rounds)
