"""The demo from texts to report: start the ranks, let them write, write the same in this process, compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..config import EpLayout
from ..errors import MoEEpConfigError, MoEEpError, MoEEpNotBuiltError, MoEEpPeerError, MoEEpTimeoutError, config_error
from ..launch import RankResult, launch
from . import alone
from .beacon import Listener
from .job import Job, RankReport
from .model import Tokenizer
from .ranks import continue_prompts
from .report import Report, compare

PROMPTS = (
    "And the priest shall",
    "And Pharaoh rose up in the night,",
    "And it came to pass on the third day, that the king of Egypt",
)
MOST_TOKENS = 1024
"""Of a prompt and its continuation: the shipped model's ``max_position_embeddings``."""


PRELOAD = ("moefleet.integrations.transformers", "transformers.modeling_utils", "transformers.generation.utils")
"""What takes ranks of a model long to import."""


def run(
    prompts: tuple[str, ...], world: int, max_new_tokens: int, layout: EpLayout, transport: str, timeout_s: float
) -> Report:
    """Start the ranks, let them write, write the same in this process, compare. Progress goes to stderr.

    Raises:
        MoEEpConfigError: a value is wrong.
        MoEEpNotBuiltError: transformers is not installed.
        MoEEpError: whatever went wrong on a rank.
    """
    require_transformers()
    tokenizer = Tokenizer(Job.model)
    ids = tuple(tokenizer.encode(text) for text in prompts)
    check_lengths(prompts, ids, max_new_tokens)
    with steps_shown() as add:
        started = add(f"starting {world} ranks", world)
        written = add("writing", -(-len(ids) // world) * max_new_tokens * world)
        checked = add("checking", len(ids) * max_new_tokens)

        def on_note(ready: int, forwards: int) -> None:
            started(ready)
            written(forwards)

        with Listener(world, on_note) as listener:
            # Half of the time, so that a rank can still say whom it waited for.
            job = Job(ids, max_new_tokens, layout, transport, timeout_s / 2, listener.port)
            with torch_warnings_off():
                # One thread each: for so small a model more are slower.
                results = launch(
                    continue_prompts, world, args=(job,), timeout_s=timeout_s, threads_per_rank=1,
                    preload=(*PRELOAD, "transformers.models.qwen3_moe.modeling_qwen3_moe"),
                )  # fmt: skip
            reports = values_of(results)
        return compare(job, reports, alone.continue_alone(job, checked), prompts, tokenizer.decode)


def require_transformers() -> None:
    """Say before any rank starts that the demo's packages are missing."""
    missing = [name for name in ("transformers", "safetensors", "tokenizers") if find_spec(name) is None]
    if missing:
        raise MoEEpNotBuiltError(
            f"the demo's model needs {' and '.join(missing)}: pip install 'moefleet[transformers]'"
        )


def check_lengths(prompts: tuple[str, ...], ids: tuple[tuple[int, ...], ...], max_new_tokens: int) -> None:
    """Whether every prompt has tokens, and room for new ones."""
    for text, tokens in zip(prompts, ids):
        if not tokens:
            raise config_error("--prompt", "an empty text", "at least one character")
        if len(tokens) + max_new_tokens > MOST_TOKENS:
            raise config_error(
                "--prompt",
                f"{len(tokens)} tokens and {max_new_tokens} new ones ({text[:40]!r}...)",
                f"at most {MOST_TOKENS} in all",
                "shorten the text, or lower --max-new-tokens",
            )


def values_of(results: list[RankResult]) -> list[RankReport]:
    """What the ranks returned, or the error that tells most: one that merely waited for another comes last."""
    failed = [(result.rank, result.error) for result in results if result.error is not None]
    if failed:
        rank, error = min(failed, key=lambda pair: isinstance(pair[1], (MoEEpPeerError, MoEEpTimeoutError)))
        kind = MoEEpConfigError if isinstance(error, MoEEpConfigError) else MoEEpError
        raise kind(str(error) if str(error).startswith(f"rank {rank} ") else f"rank {rank}: {error}") from error
    return [result.value for result in results]


@contextmanager
def torch_warnings_off() -> Iterator[None]:
    """Start processes whose torch logs errors only: it warns of each wait at the store that takes longer than usual."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@contextmanager
def steps_shown() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Progress bars on stderr, gone in the end. Yields ``add(text, total)``, which returns ``set(completed)``."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def add(text: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(text, total=total, start=not progress.tasks)

            def completed(count: int) -> None:
                if count:
                    progress.start_task(task)
                progress.update(task, completed=count)

            return completed

        yield add
