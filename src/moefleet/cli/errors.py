"""How the command shows what went wrong: one red message and status 2, or with --debug the traceback."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ..errors import MoEEpError

USER_ERROR = 2


class ShowErrors(TyperGroup):
    """The root group: catches :class:`MoEEpError` from any command below it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoEEpError as error:
            if ctx.params.get("debug"):
                raise
            show_error(str(error))
            raise typer.Exit(USER_ERROR) from error


def show_error(message: str) -> None:
    """Print to stderr, in red where that is a terminal."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)
