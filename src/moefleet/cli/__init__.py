"""The ``moefleet`` command.

A file here is a command or a group of commands. Each imports what it needs when it runs, so that help is quick.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from .._version import __version__
from .bench import bench
from .errors import ShowErrors

COMMANDS = ("chaos", "check_protocol", "demo", "doctor", "generate", "plan")
"""Modules here that offer one command: a function of the same name, and examples as ``EPILOG``."""

EXAMPLES = """\
[bold]Examples[/]

  moefleet doctor

  moefleet demo

  moefleet plan --model ./OLMoE-1B-7B --world 4

  moefleet generate --model ./OLMoE-1B-7B --world 4 --prompt "Once upon a time"

  moefleet bench comm --world 4 --tokens 1,128 --hidden 2048 --experts 64 --topk 8
"""

app = typer.Typer(
    name="moefleet",
    cls=ShowErrors,
    help="Expert-parallel Mixture-of-Experts across processes and GPUs.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moefleet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", envvar="MOEFLEET_DEBUG")
    ] = False,
) -> None:
    """Expert-parallel Mixture-of-Experts across processes and GPUs."""


for _name in COMMANDS:
    if find_spec(f"{__name__}.{_name}") is not None:
        _module = import_module(f"{__name__}.{_name}")
        app.command(epilog=getattr(_module, "EPILOG", None))(getattr(_module, _name))
app.add_typer(bench, name="bench")
