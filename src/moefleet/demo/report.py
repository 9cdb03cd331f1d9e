"""Whether the ranks wrote what one process writes, and what they did for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .job import Job, RankReport

if TYPE_CHECKING:
    from ..integrations.transformers import Continuation

TOLERANCE = 1e-3
"""Largest difference of a logit that counts as equal: float32 sums in another order differ by some 1e-5 here."""


@dataclass(frozen=True)
class Text:
    """One prompt, its continuation by the ranks, and how that differs from one process.

    Attributes:
        difference: largest of a logit, over all new tokens; NaN where one is.
    """

    prompt: str
    continuation: str
    rank: int
    same_tokens: bool
    difference: float

    @property
    def agrees(self) -> bool:
        return self.same_tokens and self.difference <= TOLERANCE


@dataclass(frozen=True)
class Report:
    """All that the demo has to say.

    Attributes:
        rows_of_rank: (token, expert) rows that each rank's experts computed, over all blocks and forwards.
        experts_of_rank, bytes_of_rank: what each rank holds.
        tokens: new tokens of all prompts; ``seconds``: of the slowest rank for them.
    """

    texts: list[Text]
    rows_of_rank: list[int]
    experts_of_rank: list[tuple[int, ...]]
    bytes_of_rank: list[int]
    tokens: int
    seconds: float
    layout: str
    transport: str

    @property
    def agrees(self) -> bool:
        """Whether every text and every logit is that of one process."""
        return all(text.agrees for text in self.texts)

    @property
    def difference(self) -> float:
        """Largest of a logit over all texts."""
        return max((text.difference for text in self.texts), key=lambda d: math.inf if math.isnan(d) else d)

    @property
    def tokens_per_second(self) -> float:
        """All ranks together, prefill included."""
        return self.tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """For ``--json``. A difference that is no number is null."""
        return {
            "agrees": self.agrees,
            "max_logit_difference": _number(self.difference),
            "tolerance": TOLERANCE,
            "world_size": len(self.rows_of_rank),
            "layout": self.layout,
            "transport": self.transport,
            "new_tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "texts": [
                {
                    "prompt": text.prompt,
                    "continuation": text.continuation,
                    "rank": text.rank,
                    "same_tokens": text.same_tokens,
                    "max_logit_difference": _number(text.difference),
                }
                for text in self.texts
            ],
            "ranks": [
                {"rank": rank, "experts": list(experts), "expert_bytes": size, "rows_computed": rows}
                for rank, (experts, size, rows) in enumerate(
                    zip(self.experts_of_rank, self.bytes_of_rank, self.rows_of_rank)
                )
            ],
        }


def compare(
    job: Job,
    ranks: Sequence[RankReport],
    alone: Sequence[Continuation],
    prompts: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> Report:
    """Put together what the ranks reported with what one process wrote.

    Args:
        job: what the ranks were told.
        ranks: their reports, in rank order.
        alone: the continuation of each prompt in one process.
        prompts: text of each prompt.
        decode: from tokens to text.
    """
    spread = {number: continuation for report in ranks for number, continuation in report.continuations.items()}
    pairs = torch.tensor([report.pairs_of_expert for report in ranks]).sum(0)
    return Report(
        texts=[
            Text(
                prompts[number],
                decode(spread[number].tokens),
                number % len(ranks),
                spread[number].tokens == alone[number].tokens,
                float((spread[number].logits - alone[number].logits).abs().max()),
            )
            for number in range(len(job.prompts))
        ],
        rows_of_rank=[int(pairs[list(report.experts)].sum()) for report in ranks],
        experts_of_rank=[report.experts for report in ranks],
        bytes_of_rank=[report.expert_bytes for report in ranks],
        tokens=sum(len(spread[number].tokens) for number in range(len(job.prompts))),
        seconds=max(report.seconds for report in ranks),
        layout=job.layout.value,
        transport=ranks[0].transport,
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
