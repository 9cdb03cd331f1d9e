"""`moefleet generate`: the texts of the unmodified model, in order, as they are written."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from typer.testing import CliRunner

from moefleet.cli import app
from moefleet.cli.generate import InOrder
from moefleet.demo.job import MODEL
from moefleet.generate import run
from moefleet.generate.job import Job, Sampling
from moefleet.generate.prompts import Growing, Texts
from moefleet.generate.ranks import written
from moefleet.generate.stream import Receiver, Sender
from moefleet.launch import RankResult
from tests.conformance.pool import shared_pool

PROMPTS = ("And the priest shall", "And Pharaoh rose up in the night,", "In")
NEW = 12


def generate(*options: str) -> Any:
    return CliRunner().invoke(app, ["generate", "--model", str(MODEL), *options])


def on_shared_ranks(fn: Any, world_size: int, *, args: tuple[Any, ...], timeout_s: float, **_: Any) -> list[RankResult]:
    """As ``launch``, on ranks that have transformers."""
    return shared_pool().run(fn, *args, timeout_s=timeout_s, world_size=world_size)


def test_ranks_write_what_one_process_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "launch", on_shared_ranks)
    (tmp_path / "third.txt").write_text(PROMPTS[2])
    sampled = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "3")
    prompts = ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--file", str(tmp_path / "third.txt"))
    small = ("--max-tokens-per-rank", "8", "--dtype", "float32", "--max-new-tokens", str(NEW), "--world", "2")
    result = generate(*prompts, *sampled, *small, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    texts = Texts(MODEL)
    ids = tuple(texts.encode(prompt) for prompt in PROMPTS)
    job = Job(MODEL, ids, NEW, Sampling(0.8, 0.9, 3))
    model = Qwen3MoeForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    expected = [written(model, number, job, Sender(0, "")) for number in range(3)]
    assert [text["tokens"] for text in report["texts"]] == expected
    assert [text["continuation"] for text in report["texts"]] == [texts.decode(tokens) for tokens in expected]
    assert [text["rank"] for text in report["texts"]] == [0, 1, 0]
    assert [rank["experts"] for rank in report["ranks"]] == [list(range(8)), list(range(8, 16))]
    for rank in report["ranks"]:
        assert rank["predicted_bytes"] == rank["measured_bytes"]


def test_a_chat_model_reads_prompts_in_its_template(tmp_path: Path) -> None:
    """On a rank that the command starts."""
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    small = ("--world", "1", "--dtype", "float32", "--max-new-tokens", "6", "--json")
    result = CliRunner().invoke(
        app, ["generate", "--model", str(tmp_path), "--chat", "--prompt", "Who art thou?", *small]
    )
    assert result.exit_code == 0, result.output
    (text,) = json.loads(result.stdout)["texts"]
    ids = tuple(b"[user] Who art thou?\n[assistant] ")  # a token of this model is a byte
    model = Qwen3MoeForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    assert text["tokens"] == written(model, 0, Job(MODEL, (ids,), 6), Sender(0, ""))
    assert text["prompt"] == "Who art thou?"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--prompt: got none, allowed at least one"),
        (("--prompt", ""), "--prompt: got an empty text"),
        (("--prompt", "a", "--chat"), "which has no chat template"),
        (("--prompt", "a", "--max-new-tokens", "1024"), "allowed at most 1024 in all"),
        (("--file", "no-such-file"), "--file: got 'no-such-file'"),
        (("--prompt", "a", "--model", "no-such-folder"), "a directory with config.json"),
        (("--prompt", "a", "--device", "cuda", "--world", "99"), "GPU"),
    ],
)
def test_mistakes_are_named_before_a_rank_starts(options: tuple[str, ...], said: str) -> None:
    result = generate(*options)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_tokens_reach_the_parent() -> None:
    got: list[Any] = []
    with Receiver(lambda *note: got.append(note)) as receiver:
        stranger, sender = Sender(receiver.port, "guess"), Sender(receiver.port, receiver.secret)
        stranger.tokens(0, [9])
        sender.tokens(1, [2, 3])
        sender.tokens(1, [], last=True)
        sender.close()
        stranger.close()
        while len(got) < 2:
            time.sleep(0.001)
    assert got == [(1, [2, 3], False), (1, [], True)]


def test_a_character_is_shown_when_it_is_whole() -> None:
    texts = Texts(MODEL)
    growing = Growing(texts)
    pieces = [growing.add([token]) for token in texts.encode("aé!")] + [growing.add([], last=True)]
    assert pieces == ["a", "", "é", "!", ""]
    cut = Growing(texts)
    assert [cut.add(texts.encode("é")[:1]), cut.add([], last=True)] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_texts_are_shown_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    shown = InOrder(("one\nmore", "two", "three"))
    shown(1, "b", False)
    shown(0, "a", False)
    assert capsys.readouterr().out == "── 1: one\na"
    shown(1, "B", True)
    shown(0, "A", True)
    assert capsys.readouterr().out == "A\n── 2: two\nbB\n── 3: three\n"
    shown(2, "c", False)
    shown.complete(("aA", "bB", "cC"))
    assert capsys.readouterr().out == "cC\n"
