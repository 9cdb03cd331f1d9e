"""``moefleet bench layer``: a whole MoE layer with the experts of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from ...bench.cases import Routing
from ...config import EpLayout
from ..devices import Device
from .options import (
    RUN,
    SIZES,
    DeviceOption,
    Dtype,
    DtypeOption,
    Json,
    Layouts,
    Plot,
    Resume,
    Rounds,
    RoutingOption,
    Steps,
    Threads,
    Timeout,
    Tokens,
    Validate,
    Warmup,
    Worlds,
    numbers,
    words_of,
)
from .running import run

EPILOG = """\
[bold]Examples[/]

  moefleet bench layer --model olmoe --world 2 --tokens 1,128 --validate

  moefleet bench layer --model deepseek-v3 --experts 16 --world 4 --layout rank_major --layout flat

  moefleet bench layer --model ./Mixtral-8x7B --intermediate 1792 --json layer.json --resume --plot layer.png

  moefleet bench layer --device cuda --model qwen3-30b-a3b --world 2 --tokens 1,128 --layout expert_major --validate
"""


def layer(
    model: Annotated[
        str,
        typer.Option(
            help="Whose sizes: mixtral-8x7b, mixtral-8x22b, olmoe, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v2-lite, "
            "deepseek-v3, or a folder with a config.json.",
            rich_help_panel=SIZES,
        ),
    ] = "olmoe",
    world: Worlds = ["2"],  # noqa: B006 - typer reads it and never writes it
    tokens: Tokens = ["128"],  # noqa: B006
    experts: Annotated[
        int | None,
        typer.Option(help="Experts of all ranks.", min=1, show_default="the model's", rich_help_panel=SIZES),
    ] = None,
    topk: Annotated[
        int | None, typer.Option(help="Experts of a token.", min=1, show_default="the model's", rich_help_panel=SIZES)
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Elements of a row.", min=1, show_default="the model's", rich_help_panel=SIZES)
    ] = None,
    intermediate: Annotated[
        int | None,
        typer.Option(
            help="Rows between an expert's matrices.", min=1, show_default="the model's", rich_help_panel=SIZES
        ),
    ] = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    routing: RoutingOption = Routing.UNIFORM,
    layout: Layouts = [],  # noqa: B006
    transport: Annotated[
        list[str],
        typer.Option(
            help="Only these; the first is compared with. On GPUs also nvlink+graph, replayed from CUDA graphs.",
            rich_help_panel=RUN,
        ),
    ] = [],  # noqa: B006
    device: DeviceOption = Device.CPU,
    steps: Steps = 5,
    warmup: Warmup = 1,
    rounds: Rounds = 5,
    threads: Threads = None,
    timeout: Timeout = 600.0,
    validate: Validate = False,
    json: Json = "",
    resume: Resume = False,
    plot: Plot = None,
) -> None:
    """Time one MoE layer with experts of a model's sizes, and where its time goes: route, dispatch, compute, combine.

    Weights are random, and their activation is SiLU.

    Where they do not fit the memory, scale them down: --experts, --hidden, --intermediate. What is shown says so.

    On GPUs a transport whose steps can be captured is measured twice, eager and from CUDA graphs. Runs under torchrun
    too.
    """
    import torch

    from ...bench.comm import CommPlan, measure
    from ...bench.layers import LayerCase, layer_candidate
    from ...bench.report import records
    from ...bench.shapes import find_shape, require_memory, scaled
    from ...launch.devices import require_device

    shape, name = scaled(find_shape(model), experts=experts, topk=topk, hidden=hidden, intermediate=intermediate)
    cases = [
        LayerCase(
            world=ranks,
            tokens=count,
            hidden=shape.hidden,
            experts=shape.experts,
            topk=shape.topk,
            layout=each,
            dtype=getattr(torch, dtype.value),
            routing=routing,
            intermediate=shape.intermediate,
            model=name,
        )
        for ranks in numbers("ranks", world, least=1)
        for each in dict.fromkeys(layout or EpLayout)
        for count in numbers("tokens", tokens)
    ]
    require_device(device.value, max(case.world for case in cases))
    require_memory(cases, device.value)
    plan = CommPlan(
        cases,
        words_of(transport),
        steps,
        warmup,
        rounds,
        validate=validate,
        threads=threads,
        timeout_s=timeout,
        build=layer_candidate,
        device=device.value,
    )
    run(plan, measure, records, json, resume, plot)
