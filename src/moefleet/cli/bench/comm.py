"""``moefleet bench comm``: dispatch and combine, without experts' work."""

from __future__ import annotations

from typing import Annotated

import typer

from ...bench.cases import CombineInput, Routing
from ...config import EpLayout
from ..devices import Device
from .gpu import run_on_gpus
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

  moefleet bench comm --world 4 --tokens 1,128 --hidden 2048 --experts 64 --topk 8

  moefleet bench comm --layout flat --transport shm,gloo-raw --routing zipf --validate

  moefleet bench comm --device cuda --world 2 --hidden 7168 --experts 256 --dtype bfloat16

  moefleet bench comm --world 2,4 --tokens 1,16,128 --json comm.json --resume --plot comm.png
"""


def comm(
    world: Worlds = ["4"],  # noqa: B006 - typer reads it and never writes it
    tokens: Tokens = ["128"],  # noqa: B006
    hidden: Annotated[int, typer.Option(help="Elements of a row.", min=1, rich_help_panel=SIZES)] = 2048,
    experts: Annotated[int, typer.Option(help="Experts of all ranks.", min=1, rich_help_panel=SIZES)] = 64,
    topk: Annotated[int, typer.Option(help="Experts of a token.", min=1, rich_help_panel=SIZES)] = 8,
    dtype: DtypeOption = Dtype.FLOAT32,
    routing: RoutingOption = Routing.UNIFORM,
    layout: Layouts = [],  # noqa: B006
    transport: Annotated[
        list[str],
        typer.Option(
            help="Only these; the first is compared with. Also gloo-raw; on GPUs nccl_ep, nixl_ep and nvlink with "
            "options, nvlink:programs=32.",
            rich_help_panel=RUN,
        ),
    ] = [],  # noqa: B006
    device: DeviceOption = Device.CPU,
    combine_input: Annotated[
        CombineInput,
        typer.Option(
            help="Where experts leave their rows: the transport's own buffer, where it has one, or a tensor.",
            rich_help_panel=SIZES,
        ),
    ] = CombineInput.BUFFER,
    steps: Steps = 10,
    warmup: Warmup = 2,
    rounds: Rounds = 10,
    threads: Threads = None,
    timeout: Timeout = 120.0,
    validate: Validate = False,
    json: Json = "",
    resume: Resume = False,
    plot: Plot = None,
) -> None:
    """Time dispatch and combine of every transport that runs here, beside two raw gloo all-to-alls of the same rows.

    A step updates the routing, dispatches, and combines rows that lie ready; its time is that of the slowest rank.

    All transports take turns in one run, so that noise hits them alike.

    On GPUs steps are also replayed from CUDA graphs, NCCL-EP and NIXL-EP are measured where they can be imported, and
    outputs are always compared; --steps, --warmup, --threads and --resume do not count there. Runs under torchrun too.
    """
    import torch

    from ...bench.cases import CommCase
    from ...bench.comm import CommPlan, measure
    from ...bench.report import records

    cases = [
        CommCase(
            world=ranks,
            tokens=count,
            hidden=hidden,
            experts=experts,
            topk=topk,
            layout=each,
            dtype=getattr(torch, dtype.value),
            routing=routing,
            combine_input=combine_input,
        )
        for ranks in numbers("ranks", world, least=1)
        for each in dict.fromkeys(layout or EpLayout)
        for count in numbers("tokens", tokens)
    ]
    if device is Device.CUDA:
        run_on_gpus(cases, words_of(transport), rounds, timeout, json, plot)
        return
    plan = CommPlan(
        cases, words_of(transport), steps, warmup, rounds, validate=validate, threads=threads, timeout_s=timeout
    )
    run(plan, measure, records, json, resume, plot)
