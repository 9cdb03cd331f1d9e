"""``moefleet generate``: a checkpoint continues prompts, its experts spread over ranks of this machine."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..config import EpLayout
from ..errors import config_error
from .devices import Device

EPILOG = """\
[bold]Examples[/]

  moefleet generate --model ./OLMoE-1B-7B --world 4 --prompt "Once upon a time"

  moefleet generate --model ./Qwen3-30B-A3B --world 2 --chat --prompt "Why is the sky blue?" --temperature 0.7 --seed 1

  moefleet generate --model ./Mixtral-8x7B --world 8 --file one.txt --file two.txt --json > texts.json

  moefleet generate --model ./Qwen3-30B-A3B --device cuda --world 2 --prompt "Once upon a time"
"""


class WeightType(str, Enum):
    """Types of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def generate(
    model: Annotated[Path, typer.Option(help="Folder with config.json, safetensors files and a tokenizer.")],
    world: Annotated[int, typer.Option(min=1, help="Ranks, each a process on this machine.")] = 2,
    prompt: Annotated[list[str], typer.Option(help="A text to continue; repeat it for more.")] = [],  # noqa: B006
    file: Annotated[list[Path], typer.Option(help="A file with a text to continue; repeat it for more.")] = [],  # noqa: B006
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt with the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most new tokens of each text.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token, more samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability of the tokens to sample from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling: the texts do not depend on the number of ranks.")] = 0,
    dtype: Annotated[WeightType, typer.Option(help="Type of the weights.")] = WeightType.AUTO,
    max_tokens_per_rank: Annotated[int, typer.Option(min=1, help="M: longer prompts take several steps.")] = 128,
    layout: Annotated[
        EpLayout | None,
        typer.Option(help="How received rows lie in memory.", show_default="flat; expert_major on GPUs"),
    ] = None,
    transport: Annotated[str, typer.Option(help="Transport between the ranks, by name.")] = "auto",
    device: Annotated[Device, typer.Option(help="Where ranks compute; cuda: a GPU for each.")] = Device.CPU,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the ranks may take.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in the end instead.")] = False,
) -> None:
    """Continue prompts with a MoE model, its experts spread over ranks.

    Each rank reads the whole model but the other ranks' experts, writes its
    share of the prompts, and computes its experts for all. Texts appear as
    they are written, in the order of the prompts: those of --prompt, then
    those of --file.
    """
    from ..generate.job import Job, Sampling
    from ..generate.run import run

    prompts = (*prompt, *map(_read, file))
    sampling = Sampling(temperature, top_p, seed)
    job = Job(model, (), max_new_tokens, sampling, dtype.value, max_tokens_per_rank, layout, transport, device.value)
    shown = None if as_json else InOrder(prompts)
    report = run(job, prompts, world, timeout, chat=chat, on_text=shown)
    if shown is None:
        typer.echo(json.dumps(report.as_json(), indent=2))
        return
    shown.complete(report.texts)
    tokens = sum(map(len, report.tokens))
    typer.echo(f"{tokens} tokens, {report.tokens_per_second:.1f} a second, {world} ranks", err=True)


class InOrder:
    """Shows texts on stdout while they are written: the first that is not complete, and each later one in its turn."""

    def __init__(self, prompts: tuple[str, ...]) -> None:
        self._prompts = prompts
        self._waiting = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._written = [0] * len(prompts)
        self._now = -1

    def __call__(self, number: int, text: str, last: bool) -> None:
        self._waiting[number] += text
        self._ended[number] |= last
        if self._now < 0:
            self._begin()
        while self._now < len(self._prompts):
            self._write(self._waiting[self._now])
            self._written[self._now] += len(self._waiting[self._now])
            self._waiting[self._now] = ""
            if not self._ended[self._now]:
                return
            self._write("\n")
            self._begin()

    def complete(self, texts: tuple[str, ...]) -> None:
        """Show what did not come while it was written."""
        for number, text in enumerate(texts):
            if not self._ended[number]:
                self(number, text[self._written[number] + len(self._waiting[number]) :], True)

    def _begin(self) -> None:
        self._now += 1
        if len(self._prompts) > 1 and self._now < len(self._prompts):
            first_line = self._prompts[self._now].strip().partition("\n")[0]
            self._write(f"── {self._now + 1}: {first_line[:70]}\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise config_error("--file", f"{str(file)!r} ({error})", "a file of UTF-8 text") from error
