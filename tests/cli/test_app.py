"""The `moefleet` command itself: help, version, and how errors are shown."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import moefleet
from moefleet.cli import app
from moefleet.errors import MoEEpConfigError

MISTAKE = ("bench", "comm", "--experts", "8", "--topk", "9")
MESSAGE = "error: topk: got 9, allowed 1 to 8, the number of experts"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("MOEFLEET_DEBUG", raising=False)
    return CliRunner()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_commands_and_gives_examples(cli: CliRunner, arguments: tuple[str, ...]) -> None:
    output = cli.invoke(app, arguments).output
    for text in ("bench", "--version", "--debug", "MOEFLEET_DEBUG", "Examples", "moefleet bench comm --world 4"):
        assert text in output


def test_bench_comm_help_shows_its_options(cli: CliRunner) -> None:
    result = cli.invoke(app, ["bench", "comm", "--help"])
    assert result.exit_code == 0
    for text in ("--tokens", "--layout", "--transport", "--combine-input", "rank_major", "zipf", "Examples"):
        assert text in result.output


@pytest.mark.parametrize("command", ["comm", "layer", "model"])
def test_what_is_measured_can_be_kept_drawn_and_resumed(cli: CliRunner, command: str) -> None:
    result = cli.invoke(app, ["bench", command, "--help"])
    assert result.exit_code == 0
    for text in ("--world", "--validate", "--json", "--resume", "--plot", "Examples", f"moefleet bench {command}"):
        assert text in result.output


def test_version(cli: CliRunner) -> None:
    result = cli.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"moefleet {moefleet.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bunch",), "Did you mean 'bench'?"),
        (("bench", "comn"), "Did you mean 'comm'?"),
        (("bench", "comm", "--wrold", "4"), "No such option: --wrold"),
        (("bench", "comm", "--tokens", "many"), "'many' is not a list of numbers of tokens such as 1,128"),
        (("bench", "comm", "--layout", "round"), "'round' is not one of 'expert_major', 'rank_major', 'flat'"),
    ],
)
def test_usage_errors(cli: CliRunner, arguments: tuple[str, ...], text: str) -> None:
    result = cli.invoke(app, arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_our_errors_are_one_message_and_status_2(cli: CliRunner) -> None:
    result = cli.invoke(app, MISTAKE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == MESSAGE + "\n"


@pytest.mark.parametrize(("before", "environment"), [(["--debug"], {}), ([], {"MOEFLEET_DEBUG": "1"})])
def test_debug_lets_the_error_through(cli: CliRunner, before: list[str], environment: dict[str, str]) -> None:
    result = cli.invoke(app, [*before, *MISTAKE], env=environment)
    assert isinstance(result.exception, MoEEpConfigError)


def test_a_process_shows_no_traceback_and_loads_nothing_heavy() -> None:
    code = f"""
import sys
from moefleet.cli import app
try:
    app({list(MISTAKE)})
finally:
    print(sorted({{"transformers", "matplotlib", "safetensors", "triton"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == MESSAGE
    assert done.stdout.strip() == "[]"
