"""What every rank is told, and what it tells in the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import EpLayout

if TYPE_CHECKING:
    from ..integrations.transformers import Continuation

MODEL = Path(__file__).parent.parent / "assets" / "tiny-moe"


@dataclass(frozen=True)
class Job:
    """The same for all ranks.

    Args:
        prompts: token ids of each; prompt ``p`` is rank ``p % W``'s.
        max_new_tokens: new tokens of each.
        layout, transport: of the Fleet.
        timeout_s: longest wait of a rank for another.
        beacon_port: where ranks tell how far they are; 0 for nowhere.
        model: directory of the model.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    layout: EpLayout = EpLayout.EXPERT_MAJOR
    transport: str = "auto"
    timeout_s: float = 60.0
    beacon_port: int = 0
    model: Path = MODEL


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        continuations: of its own prompts, by their numbers.
        seconds: from when all ranks were ready until its last token.
        pairs_of_expert: ``[E]`` for each expert the (token, expert) pairs that this rank sent to it, over all blocks.
        experts: the experts that it holds, the same in every block.
        expert_bytes: memory of those, over all blocks.
        transport: the one that was chosen.
    """

    continuations: dict[int, Continuation]
    seconds: float
    pairs_of_expert: list[int]
    experts: tuple[int, ...]
    expert_bytes: int
    transport: str
