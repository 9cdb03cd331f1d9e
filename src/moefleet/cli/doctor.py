"""``moefleet doctor``: what this machine has, what works on it, and what to install for the rest."""

from __future__ import annotations

import json
from typing import Annotated

import typer

NOTHING_WORKS = 1
EPILOG = """\
[bold]Examples[/]

  moefleet doctor

  moefleet doctor --limits

  moefleet doctor --json | jq '.transports[] | select(.available) | .name'
"""


def doctor(
    limits: Annotated[bool, typer.Option("--limits", help="Also show the bounds of each transport.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, limits included.")] = False,
) -> None:
    """Show what works on this machine, and why the rest does not.

    Shown are cores, memory, GPUs and which of them reach each other, the
    versions of packages, and every transport and kernel, those of other
    packages too: whether it works, why not, and the pip line that would help.
    The exit status is 1 if no transport works.
    """
    from rich.console import Console

    from ..doctor import examine
    from ..doctor.show import show

    found = examine()
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show(Console(highlight=False), found, limits)
    if not found.healthy:
        raise typer.Exit(NOTHING_WORKS)
