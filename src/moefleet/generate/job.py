"""What every rank is told, and what it tells in the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import EpLayout


@dataclass(frozen=True)
class Sampling:
    """How a next token is chosen.

    Args:
        temperature: 0 takes the likeliest.
        top_p: of the likeliest tokens, those that together have this probability.
        seed: prompt ``p`` is sampled with ``seed + p``, so its text does not depend on the number of ranks.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """The same for all ranks.

    Args:
        model: directory of the checkpoint.
        prompts: token ids of each; prompt ``p`` is rank ``p % W``'s.
        max_new_tokens: the most new tokens of each.
        sampling: greedy or sampled.
        dtype: of the weights, ``"auto"`` for the checkpoint's.
        max_tokens_per_rank: ``M``; longer prompts take several steps.
        layout, transport: of the Fleet; layout ``None`` for what :func:`expert_parallel` takes by itself.
        device: ``"cpu"``, or ``"cuda"`` for a GPU each.
        timeout_s: longest wait of a rank for another.
        port, secret: where new tokens are sent while they are written; port 0 for nowhere.
    """

    model: Path
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    dtype: str = "auto"
    max_tokens_per_rank: int = 128
    layout: EpLayout | None = None
    transport: str = "auto"
    device: str = "cpu"
    timeout_s: float = 300.0
    port: int = 0
    secret: str = ""


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        texts: new token ids of its own prompts, by their numbers.
        load_s, write_s: seconds until the model was ready, and from then until all ranks were done.
        experts: those that it holds, the same in every block.
        predicted, measured: bytes: dense, experts, buffers.
        transport: the one that was chosen.
    """

    texts: dict[int, list[int]]
    load_s: float
    write_s: float
    experts: tuple[int, ...]
    predicted: tuple[int, int, int]
    measured: tuple[int, int, int]
    transport: str
