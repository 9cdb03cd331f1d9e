"""From prompts to report: tokens, ranks, text as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..demo.run import PRELOAD, require_transformers, torch_warnings_off, values_of
from ..errors import config_error
from ..launch import launch
from ..launch.devices import require_device
from .job import Job, RankReport
from .prompts import Growing, Texts
from .ranks import write_prompts
from .stream import Receiver

OnText = Callable[[int, str, bool], None]
"""Called with a prompt's number, what is new of its text, and whether this is the end."""


@dataclass(frozen=True)
class Report:
    """What came of it.

    Attributes:
        prompts, texts: each prompt and what follows it.
        tokens: new tokens of each.
        ranks: every rank's own report.
    """

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    tokens: tuple[list[int], ...]
    ranks: tuple[RankReport, ...]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all ranks, from when the slowest had loaded."""
        return sum(map(len, self.tokens)) / max(max(rank.write_s for rank in self.ranks), 1e-9)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("dense", "experts", "buffers")
        return {
            "world_size": len(self.ranks),
            "transport": self.ranks[0].transport,
            "tokens_per_second": self.tokens_per_second,
            "texts": [
                {"prompt": prompt, "rank": number % len(self.ranks), "continuation": text, "tokens": tokens}
                for number, (prompt, text, tokens) in enumerate(zip(self.prompts, self.texts, self.tokens))
            ],
            "ranks": [
                {
                    "experts": list(rank.experts),
                    "load_s": rank.load_s,
                    "write_s": rank.write_s,
                    "predicted_bytes": dict(zip(names, rank.predicted)),
                    "measured_bytes": dict(zip(names, rank.measured)),
                }
                for rank in self.ranks
            ],
        }


def run(
    job: Job, prompts: tuple[str, ...], world: int, timeout_s: float, *, chat: bool = False, on_text: OnText | None
) -> Report:
    """Start the ranks and let them write.

    Args:
        job: with everything but ``prompts``, ``port`` and ``secret``, which are filled in here.
        prompts: texts, at least one.
        world: ranks.
        timeout_s: seconds that the ranks may take.
        chat: wrap prompts with the model's chat template.
        on_text: called while texts are written, from other threads, one call at a time.

    Raises:
        MoEEpConfigError: a value is wrong.
        MoEEpNotBuiltError: transformers is not installed, or too old.
        MoEEpArchError: there is no GPU.
        MoEEpError: whatever went wrong on a rank.
    """
    require_device(job.device, world)
    require_transformers()
    from ..integrations.transformers.checkpoint import model_class_of

    if not prompts:
        raise config_error("--prompt", "none", "at least one", "give --prompt or --file")
    model_class, config = model_class_of(job.model)
    texts = Texts(Path(job.model), chat=chat)
    ids = tuple(texts.encode(prompt) for prompt in prompts)
    check_lengths(ids, job.max_new_tokens, getattr(config, "max_position_embeddings", None))
    growing = [Growing(texts) for _ in prompts]

    def on_tokens(number: int, new: Any, last: bool) -> None:
        if on_text is not None:
            on_text(number, growing[number].add(new, last=last), last)

    with Receiver(on_tokens) as receiver, torch_warnings_off():
        port, secret = (receiver.port, receiver.secret) if on_text is not None else (0, "")
        # Half of the time, so that a rank can still say whom it waited for.
        told = replace(job, prompts=ids, timeout_s=timeout_s / 2, port=port, secret=secret)
        results: Any = launch(
            write_prompts, world, args=(told,), timeout_s=timeout_s, preload=(*PRELOAD, model_class.__module__)
        )
    ranks: tuple[RankReport, ...] = tuple(cast(Any, values_of(results)))
    written = {number: tokens for rank in ranks for number, tokens in rank.texts.items()}
    tokens = tuple(written[number] for number in range(len(prompts)))
    return Report(prompts, tuple(map(texts.decode, tokens)), tokens, ranks)


def check_lengths(ids: tuple[tuple[int, ...], ...], max_new_tokens: int, most: int | None) -> None:
    """Whether every prompt and its continuation fit the model."""
    longest = max(map(len, ids))
    if most is not None and longest + max_new_tokens > most:
        raise config_error(
            "--prompt",
            f"{longest} tokens and {max_new_tokens} new ones",
            f"at most {most} in all, the model's max_position_embeddings",
            "shorten the text, or lower --max-new-tokens",
        )
