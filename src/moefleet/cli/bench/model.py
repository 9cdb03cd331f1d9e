"""``moefleet bench model``: a whole model over ranks beside the same model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...config import EpLayout
from ..devices import Device
from .options import (
    RUN,
    SIZES,
    DeviceOption,
    Dtype,
    DtypeOption,
    Json,
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

  moefleet bench model --device cuda --model ./OLMoE-1B-7B --dtype bfloat16 --world 2 --transport nvlink,torch_dist
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
    layout: Annotated[
        list[EpLayout],
        typer.Option(
            help="Of the Fleet; may be repeated.", show_default="flat; expert_major on GPUs", rich_help_panel=SIZES
        ),
    ] = [],  # noqa: B006
    transport: Annotated[list[str], typer.Option(help="Only these.", show_default="as auto", rich_help_panel=RUN)] = [],  # noqa: B006
    warmup: Annotated[int, typer.Option(help="Untimed generations first.", min=0, rich_help_panel=RUN)] = 1,
    device: DeviceOption = Device.CPU,
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

    On GPUs each rank has one, and the process has the first one. Runs under torchrun too.

    Each rank has its part of the batch and of the experts. --validate demands the same tokens.
    """
    import torch

    from ...bench.generation import ModelCase
    from ...bench.model import ModelPlan, measure, records
    from ...demo.job import MODEL
    from ...demo.run import require_transformers
    from ...launch.devices import require_device

    require_transformers()
    worlds = numbers("ranks", world, least=1)
    require_device(device.value, max(worlds))
    usual = EpLayout.FLAT if device is Device.CPU else EpLayout.EXPERT_MAJOR
    cases = [
        ModelCase(
            model=model or MODEL,
            world=ranks,
            batch=count,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            layout=each,
            dtype=getattr(torch, dtype.value),
            device=device.value,
        )
        for ranks in worlds
        for each in dict.fromkeys(layout or [usual])
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
