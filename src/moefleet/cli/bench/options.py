"""Options that the bench commands share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ...bench.cases import Routing
from ...config import EpLayout
from ..devices import Device

SIZES, RUN, OUTPUT = "What is measured", "How", "Output"


class Dtype(str, Enum):
    """Types of a row's elements, by torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Worlds = Annotated[list[str], typer.Option(help="Ranks; repeat it or separate by commas.", rich_help_panel=SIZES)]
Tokens = Annotated[
    list[str], typer.Option(help="Tokens of each rank; repeat it or separate by commas.", rich_help_panel=SIZES)
]
Layouts = Annotated[list[EpLayout], typer.Option(help="Only this layout; may be repeated.", rich_help_panel=SIZES)]
DtypeOption = Annotated[Dtype, typer.Option(help="Type of a row's elements.", rich_help_panel=SIZES)]
RoutingOption = Annotated[Routing, typer.Option(help="How tokens choose experts.", rich_help_panel=SIZES)]
Steps = Annotated[int, typer.Option(help="Timed steps of a candidate in each round.", min=1, rich_help_panel=RUN)]
Warmup = Annotated[int, typer.Option(help="Untimed steps before them.", min=0, rich_help_panel=RUN)]
Rounds = Annotated[int, typer.Option(help="How often candidates take turns.", min=1, rich_help_panel=RUN)]
DeviceOption = Annotated[
    Device, typer.Option(help="Where ranks keep their tensors; cuda: a GPU for each.", rich_help_panel=RUN)
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of each rank.", min=1, show_default="cores / ranks", rich_help_panel=RUN)
]
Timeout = Annotated[float, typer.Option(help="Seconds that one round may take.", rich_help_panel=RUN)]
Validate = Annotated[
    bool, typer.Option("--validate", help="Compare outputs with the reference; exit 1 if wrong.", rich_help_panel=RUN)
]
Json = Annotated[
    str,
    typer.Option(
        help="Write records to this file after each case; - is stdout.", metavar="FILE", rich_help_panel=OUTPUT
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Measure only the cases that --json FILE does not have yet.", rich_help_panel=OUTPUT),
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw a picture (needs matplotlib).", metavar="FILE", rich_help_panel=OUTPUT)
]


def numbers(name: str, texts: Sequence[str], least: int = 0) -> list[int]:
    """``["1,128", "64"]`` as ``[1, 128, 64]``.

    Args:
        name: of what these are, for the message where they are not.
        least: the smallest that is allowed.
    """
    words = words_of(texts)
    if not words or not all(word.isdecimal() and int(word) >= least for word in words):
        raise typer.BadParameter(f"{', '.join(texts)!r} is not a list of numbers of {name} such as 1,128")
    return [int(word) for word in dict.fromkeys(words)]


def words_of(texts: Sequence[str]) -> list[str]:
    """``["a, b", "c"]`` as ``["a", "b", "c"]``."""
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]
