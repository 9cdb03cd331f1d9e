"""What Fleets of common sizes would take, by the formulas of the transports; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EpAlgorithm, EpLayout, FleetParams
from ..plan.memory import FORMULAS, fleet_memory

EXPERTS, TOPK, HIDDEN, WORLD = 256, 8, 7168, 8
"""The sizes of DeepSeek-V3, over one machine of eight GPUs."""

SIZES = ((EpLayout.EXPERT_MAJOR, 128), (EpLayout.RANK_MAJOR, 128), (EpLayout.FLAT, 4096))


@dataclass(frozen=True)
class FleetSize:
    """Bytes that a rank of a Fleet takes at most.

    Attributes:
        layout: how received rows lie in memory.
        max_tokens_per_rank: M.
        at_most: by transport.
    """

    layout: str
    max_tokens_per_rank: int
    at_most: dict[str, int]


def fleet_sizes() -> tuple[FleetSize, ...]:
    """One for each layout, rows of bfloat16."""
    return tuple(_size(layout, most) for layout, most in SIZES)


def _size(layout: EpLayout, most: int) -> FleetSize:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    params = FleetParams(EXPERTS, most, HIDDEN, algorithm=algorithm, layout=layout, max_topk=TOPK)
    found = {name: memory.at_most for name in FORMULAS if (memory := fleet_memory(name, params, WORLD)) is not None}
    return FleetSize(layout.value, most, found)
