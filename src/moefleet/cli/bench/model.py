"""``moefleet bench model``: a whole model over ranks beside the same model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...config import EpLayout
from .options import (
    RUN,
    SIZES,
    Dtype,
    DtypeOption,
    Json,
    Layouts,
    Plot,
    Resume,
    Rounds,
    Threads,
    Timeout,
    Validate,
    Worlds,
    numbers,
    words_of,
)
from .running import run

EPILOG = """\
[bold]Examples[/]

  moefleet bench model --world 2 --batch 8 --validate

  moefleet bench model --model ./OLMoE-1B-7B --dtype bfloat16 --world 2,4 --batch 1,8 --json model.json --resume

  moefleet bench model --layout expert_major --layout flat --transport shm,torch_dist --plot model.png
"""


def model(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with config.json and safetensors files.",
            show_default="the small model in this package",
            rich_help_panel=SIZES,
        ),
    ] = None,
    world: Worlds = ["2"],  # noqa: B006 - typer reads it and never writes it
    batch: Annotated[
        list[str],
        typer.Option(help="Sequences of all ranks together; repeat it or separate by commas.", rich_help_panel=SIZES),
    ] = ["8"],  # noqa: B006
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt, random ones.", min=1, rich_help_panel=SIZES)
    ] = 32,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each text.", min=2, rich_help_panel=SIZES)] = 64,
    dtype: DtypeOption = Dtype.FLOAT32,
    layout: Layouts = [EpLayout.FLAT],  # noqa: B006
    transport: Annotated[list[str], typer.Option(help="Only these.", show_default="as auto", rich_help_panel=RUN)] = [],  # noqa: B006
    warmup: Annotated[int, typer.Option(help="Untimed generations first.", min=0, rich_help_panel=RUN)] = 1,
    rounds: Rounds = 10,
    threads: Threads = None,
    alone_threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of the unmodified model.", min=1, show_default="those of all ranks", rich_help_panel=RUN
        ),
    ] = None,
    timeout: Timeout = 600.0,
    validate: Validate = False,
    json: Json = "",
    resume: Resume = False,
    plot: Plot = None,
) -> None:
    """Time greedy generation of a batch by ranks beside the unmodified transformers model in one process.

    Both run the same loop with a KV cache, in turn, on the same cores: the process has the threads of all ranks.

    Each rank has its part of the batch and of the experts. --validate demands the same tokens.
    """
    import torch

    from ...bench.generation import ModelCase
    from ...bench.model import ModelPlan, measure, records
    from ...demo.job import MODEL
    from ...demo.run import require_transformers

    require_transformers()
    cases = [
        ModelCase(model or MODEL, ranks, count, prompt_tokens, new_tokens, each, getattr(torch, dtype.value))
        for ranks in numbers("ranks", world, least=1)
        for each in dict.fromkeys(layout)
        for count in numbers("sequences", batch, least=1)
    ]
    plan = ModelPlan(
        cases,
        words_of(transport),
        rounds,
        warmup,
        validate=validate,
        threads=threads,
        alone_threads=alone_threads,
        timeout_s=timeout,
    )
    run(plan, measure, records, json, resume, plot)
