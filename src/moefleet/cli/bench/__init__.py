"""``moefleet bench``: measurements on this machine. A file is one of its commands, but for those that all share."""

from __future__ import annotations

import typer

from .comm import EPILOG as COMM_EXAMPLES
from .comm import comm
from .layer import EPILOG as LAYER_EXAMPLES
from .layer import layer
from .model import EPILOG as MODEL_EXAMPLES
from .model import model

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine: all candidates take turns in one run, so that noise hits them alike.

    Worlds, layouts and token counts may be lists; every combination is a case, and --resume goes on with an interrupted
    run.
    """


bench.command(epilog=COMM_EXAMPLES)(comm)
bench.command(epilog=LAYER_EXAMPLES)(layer)
bench.command(epilog=MODEL_EXAMPLES)(model)
