"""``moefleet demo``: the shipped model continues texts, its experts spread over ranks of this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..config import EpLayout

WRONG_OUTPUT = 1


def demo(
    world: Annotated[int, typer.Option(min=1, help="Ranks, each a process on this machine.")] = 4,
    prompt: Annotated[
        list[str],
        typer.Option(
            help="A text to continue; repeat it for more. They go to the ranks in turn.", show_default="three"
        ),
    ] = [],  # noqa: B006 - typer reads it and never writes it
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens (bytes) of each text.")] = 96,
    layout: Annotated[EpLayout, typer.Option(help="How received rows lie in memory.")] = EpLayout.EXPERT_MAJOR,
    transport: Annotated[str, typer.Option(help="Transport between the ranks, by name.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the ranks may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Continue texts with a real model, its experts spread over CPU ranks.

    The Qwen3-MoE language model in this package runs on all ranks, in
    float32. Each rank keeps only its share of the experts, and tokens travel
    to the ranks of the experts that they choose. Shown are the texts, the
    load of each rank, the speed, and whether text and logits equal those of
    the same model in one process: the exit status is 1 if not.

    [bold]Examples[/]

      moefleet demo

      moefleet demo --world 2 --layout rank_major

      moefleet demo --prompt "Blessed are" --max-new-tokens 300

      moefleet demo --json > demo.json
    """
    from rich.console import Console

    from ..demo.run import PROMPTS, run
    from ..demo.show import show

    report = run(tuple(prompt) or PROMPTS, world, max_new_tokens, layout, transport, timeout)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        show(Console(highlight=False), report)
    if not report.agrees:
        raise typer.Exit(WRONG_OUTPUT)
