"""``moefleet check-protocol``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moefleet.cli.check_protocol import BROKEN, check_protocol
from moefleet.fleet.agreement import checker
from moefleet.fleet.agreement.checker.scopes import Scope
from moefleet.fleet.agreement.checker.world import Setting

SMALL = Scope("2 ranks", Setting(2, 1, 1), ((0, 0),))

app = typer.Typer()
app.command()(check_protocol)


@pytest.fixture(autouse=True)
def small_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "QUICK", (SMALL,))
    monkeypatch.setattr(checker, "FULL", (SMALL, SMALL))


def test_json_and_markdown_say_the_same(tmp_path: Path) -> None:
    table, report = tmp_path / "table.md", tmp_path / "report.json"
    result = CliRunner().invoke(app, ["--mutants", "--markdown", str(table), "--json", str(report)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    (scope,) = found["results"]
    assert scope["holds"] and scope["states"] > 10
    assert f"| 2 ranks | {scope['states']} | {scope['transitions']} |" in table.read_text()
    assert len(found["mutants"]) == len(checker.MUTANTS)
    assert "takeover that masks" in table.read_text()


def test_full_is_more_than_quick() -> None:
    result = CliRunner().invoke(app, ["--scope", "full", "--json", "-"])
    assert result.exit_code == 0
    assert result.stdout.count('"holds": true') == 2


def test_a_mutant_that_slips_through_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "MUTANTS", (checker.Mutant("no mistake at all", "a", SMALL),))
    result = CliRunner().invoke(app, ["--mutants"])
    assert result.exit_code == BROKEN
    assert "NOT CAUGHT" in result.output


def test_a_broken_property_is_an_error_with_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    minority = next(mutant for mutant in checker.MUTANTS if mutant.name == "an accepted minority")
    monkeypatch.setattr(checker, "check", lambda scope, tick: minority.search())
    result = CliRunner().invoke(app, [])
    assert result.exit_code == BROKEN
    assert "(e) decision 1 rests on 1 alone" in result.output
    assert "rank 1 posts in round 1" in result.output
