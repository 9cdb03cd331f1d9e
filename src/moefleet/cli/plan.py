"""``moefleet plan``: what a model takes on a number of ranks, before anything runs."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import EpLayout
from ..errors import config_error
from ..knobs import FP8E4M3, FleetAlgoKnobQuantization

if TYPE_CHECKING:
    from ..plan import Checkpoint, ModelShape

EPILOG = """\
[bold]Examples[/]

  moefleet plan --model ./Qwen3-30B-A3B --world 8

  moefleet plan --model ./Mixtral-8x7B --world 4 --tokens 128 --layout rank_major --memory 80

  moefleet plan --experts 256 --topk 8 --hidden 7168 --intermediate 2048 --layers 58 --world 64

  moefleet plan --model ./Qwen3-30B-A3B --world 8 --json > plan.json
"""
MODEL, FLEET = "The model", "The Fleet"


class RowType(str, Enum):
    """Types of a row's elements."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"


def plan(
    world: Annotated[int, typer.Option(min=1, help="Ranks.", rich_help_panel=FLEET)],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder with config.json and, maybe, safetensors files.", rich_help_panel=MODEL),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of a layer, without --model.", rich_help_panel=MODEL)
    ] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.", rich_help_panel=MODEL)] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Elements of a row.", rich_help_panel=MODEL)] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="Intermediate size of an expert.", rich_help_panel=MODEL)
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers with experts.", rich_help_panel=MODEL)] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="max_tokens_per_rank (M).",
            show_default="what is advised for each layout",
            rich_help_panel=FLEET,
        ),
    ] = None,
    layout: Annotated[
        list[EpLayout], typer.Option(help="Only this layout; may be repeated.", rich_help_panel=FLEET)
    ] = [],  # noqa: B006 - typer reads it and never writes it
    dtype: Annotated[
        RowType | None,
        typer.Option(
            help="Type of rows, and of weights where there are no files.",
            show_default="the model's, or bfloat16",
            rich_help_panel=FLEET,
        ),
    ] = None,
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8", help="Quantise rows on their way: FleetAlgoKnobQuantization({'FP8E4M3'}).", rich_help_panel=FLEET
        ),
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="GiB that each rank may take.", show_default="what is free here", rich_help_panel=FLEET
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Compute what a MoE model takes on W ranks. Nothing is loaded or run.

    Shown are the experts and weights of each rank, the bytes that cross in a
    step, the memory of a Fleet in every layout by each transport's own
    formula, which transports fit and why others do not, and a proposal for
    max_tokens_per_rank. Weights come from the headers of safetensors files
    where these are there, and from the config alone where not.
    """
    from rich.console import Console

    from ..plan import look, make_plan
    from ..plan.show import show

    sizes = {
        "experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate, "layers": layers
    }  # fmt: skip
    shape, checkpoint = _model(model, sizes, dtype)
    around = look(None if memory is None else int(memory * 2**30))
    found = make_plan(
        shape,
        world,
        around,
        tokens=tokens,
        layouts=layout or tuple(EpLayout),
        checkpoint=checkpoint,
        algo_knobs=[FleetAlgoKnobQuantization(frozenset({FP8E4M3}))] if fp8 else [],
    )
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show(Console(highlight=False), found)


def _model(
    folder: Path | None, sizes: dict[str, int | None], dtype: RowType | None
) -> tuple[ModelShape, Checkpoint | None]:
    """From the folder, or from sizes alone."""
    from ..plan import ModelShape, read_checkpoint, read_model

    given = {name: value for name, value in sizes.items() if value is not None}
    if folder is not None:
        if given:
            options = " ".join(f"--{name}" for name in given)
            raise config_error(options, "given beside --model", "one of them", "leave it out: config.json says it")
        shape = read_model(folder, None if dtype is None else dtype.value)
        checkpoint = read_checkpoint(folder, shape.experts, shape.layers) if folder.is_dir() else None
        return shape, checkpoint
    if missing := [f"--{name}" for name in sizes if name not in given]:
        raise config_error("plan", f"no --model and no {' '.join(missing)}", "a model's folder, or all sizes")
    name = dtype.value if dtype else "bfloat16"
    shape = ModelShape(
        "model",
        experts=given["experts"],
        topk=given["topk"],
        hidden=given["hidden"],
        intermediate=given["intermediate"],
        layers=given["layers"],
        moe_layers=given["layers"],
        dtype=name,
    )
    return shape, None
