"""`moefleet demo`: what it reports, and that a wrong output is its exit status."""

from __future__ import annotations

import io
import json
import math
import os
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moefleet.cli import app
from moefleet.demo import alone, run
from moefleet.demo.beacon import Beacon, Listener
from moefleet.demo.job import Job, RankReport
from moefleet.demo.report import TOLERANCE, Report, compare
from moefleet.demo.show import ranks_in_words, show
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpNotBuiltError, MoEEpPeerError
from moefleet.integrations.transformers import Continuation
from moefleet.launch import RankResult

NEW = 8


def demo(*options: str) -> Any:
    return CliRunner().invoke(app, ["demo", *options])


def test_ranks_write_what_one_process_writes() -> None:
    result = demo("--world", "2", "--max-new-tokens", str(NEW), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["agrees"] is True
    assert report["max_logit_difference"] <= report["tolerance"] == TOLERANCE
    assert (report["world_size"], report["layout"], report["new_tokens"]) == (2, "expert_major", 3 * NEW)
    assert report["tokens_per_second"] > 0
    assert [text["rank"] for text in report["texts"]] == [0, 1, 0]
    assert tuple(text["prompt"] for text in report["texts"]) == run.PROMPTS
    for text in report["texts"]:
        assert text["same_tokens"]
        assert len(text["continuation"].encode()) == NEW, "a token is a byte"
    first, second = report["ranks"]
    assert first["experts"] + second["experts"] == list(range(16))
    # Every token of every forward goes to 4 experts in each of 4 blocks; the last new token is in no forward.
    tokens = sum(len(prompt) + NEW - 1 for prompt in run.PROMPTS)
    assert first["rows_computed"] + second["rows_computed"] == tokens * 4 * 4
    assert first["expert_bytes"] == second["expert_bytes"] == 4 * 8 * 3 * 128 * 96 * 4


# Without ranks: what they return is made here.

LOGITS = torch.tensor([[0.0, 3.0], [2.0, 1.0]])
TEXT = Continuation([1, 0], LOGITS)


def rank_report(rank: int, texts: dict[int, Continuation]) -> RankReport:
    return RankReport(texts, 0.5 + rank, [rank, 1, 2, 3], ((0, 1), (2, 3))[rank], 1024, "shm")


def fake_launch(fn: Any, world: int, *, args: tuple[Job], **_: Any) -> list[RankResult]:
    texts = dict.fromkeys(range(len(args[0].prompts)), TEXT)
    return [
        RankResult(rank, rank_report(rank, {n: t for n, t in texts.items() if n % 2 == rank}), None, 0)
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        (TEXT, None),
        (Continuation([1, 0], LOGITS + TOLERANCE / 2), None),
        (Continuation([1, 1], LOGITS), "the text differs, after 'A'"),
        (Continuation([1, 0], LOGITS + 2 * TOLERANCE), "a logit differs by 2.0e-03, after 'A'"),
        (Continuation([1, 0], LOGITS * math.nan), "a logit differs by nan, after 'A'"),
    ],
)
def test_a_difference_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, truth: Continuation, said: str | None) -> None:
    monkeypatch.setattr(run, "launch", fake_launch)
    monkeypatch.setattr(alone, "continue_alone", lambda job, on_step: [truth, TEXT])
    options = ("--world", "2", "--prompt", "A", "--prompt", "B")
    shown, as_json = demo(*options), demo(*options, "--json")
    assert shown.exit_code == as_json.exit_code == (0 if said is None else 1), shown.output
    report = json.loads(as_json.stdout)
    assert report["agrees"] is (said is None)
    if said is None:
        assert "Text and logits equal those of the same model in one process" in shown.output
    else:
        assert "NOT what the same model writes" in shown.output
        assert f"rank 0: {said}" in shown.output
    if said is not None and "nan" in said:
        assert report["max_logit_difference"] is report["texts"][0]["max_logit_difference"] is None


def report_of(prompts: tuple[str, ...] = ("A", "B"), text: str = "text") -> Report:
    job = Job(tuple((0,) for _ in prompts), 2)
    ranks = [rank_report(0, {0: TEXT}), rank_report(1, {1: TEXT})]
    return compare(job, ranks, [TEXT, TEXT], prompts, lambda ids: text)


def test_load_is_that_of_the_experts_of_a_rank_and_time_that_of_the_slowest() -> None:
    report = report_of()
    assert report.rows_of_rank == [1 + 2, 4 + 6]
    assert (report.tokens, report.seconds) == (4, 1.5)


def test_what_is_shown_fits_a_terminal_and_cannot_steer_it() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    show(console, report_of(("[bold]A\x1b[2J", "B"), "\x07wrote\n"))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]A\ufffd[2J\ufffdwrote" in out
    assert max(map(len, out.splitlines())) <= 80
    load = [line.split() for line in out.splitlines() if line.startswith("rank") and "experts" in line]
    assert [line[-2:] for line in load] == [["3", "23%"], ["10", "77%"]]


def test_progress_reaches_the_parent() -> None:
    seen: list[tuple[int, int]] = []
    with Listener(2, lambda ready, forwards: seen.append((ready, forwards))) as listener:
        port = listener.port
        for rank, steps in ((0, 3), (1, 1), (5, 1)):  # there is no rank 5
            with closing(Beacon(rank, port)) as beacon:
                for _ in range(steps):
                    beacon.step()
        deadline = time.monotonic() + 30
        while (2, 2) not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen[-1] == (2, 2)
    with closing(Beacon(0, port)) as beacon:
        beacon.step()  # nobody listens, and nothing happens


@pytest.mark.parametrize(("ranks", "words"), [([3], "rank 3 has"), ([3, 4, 5], "ranks 3-5 have")])
def test_ranks_without_a_text_are_named(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


# Errors.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt", ""), "--prompt: got an empty text"),
        (("--prompt", "x" * 1000, "--max-new-tokens", "25"), "1000 tokens and 25 new ones"),
        (("--world", "0"), "greater than or equal to 1"),
        (("--layout", "sideways"), "sideways"),
    ],
)
def test_a_bad_option_is_refused_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(run, "launch", None)
    result = demo(*options)
    assert result.exit_code == 2
    assert said in result.output


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "tokenizers" else name)
    with pytest.raises(MoEEpNotBuiltError, match=r"needs tokenizers: pip install 'moefleet\[transformers\]'"):
        run.require_transformers()


def test_of_several_errors_the_cause_is_told() -> None:
    results = [RankResult(0, None, MoEEpPeerError("rank 1 failed"), 1), RankResult(1, None, OSError("no disk"), 1)]
    with pytest.raises(MoEEpError, match="rank 1: no disk"):
        run.values_of(results)
    results[1] = replace(results[1], error=MoEEpError("rank 1 was killed"))
    with pytest.raises(MoEEpError, match=r"^rank 1 was killed"):
        run.values_of(results)
    results[1] = replace(results[1], error=MoEEpConfigError("x: got y"))
    with pytest.raises(MoEEpConfigError, match="rank 1: x: got y"):
        run.values_of(results)


def test_the_job_of_a_rank_waits_for_less_than_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Job, float]] = []

    def launch(fn: Any, world: int, *, args: tuple[Job], timeout_s: float, **_: Any) -> list[RankResult]:
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
        jobs.append((args[0], timeout_s))
        return fake_launch(fn, world, args=args)

    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.setattr(run, "launch", launch)
    monkeypatch.setattr(alone, "continue_alone", lambda job, on_step: [TEXT, TEXT])
    assert demo("--prompt", "A", "--prompt", "B", "--timeout", "20", "--transport", "shm").exit_code == 0
    ((job, timeout_s),) = jobs
    assert (timeout_s, job.timeout_s, job.transport) == (20, 10, "shm")
    assert job.prompts == ((ord("A"),), (ord("B"),))
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
