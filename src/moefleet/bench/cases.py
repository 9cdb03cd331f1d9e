"""What is measured: one step's sizes and routing, and the bytes that have to cross.

Everything follows from the case itself, so that every rank knows what all others send.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from ..config import EpAlgorithm, EpLayout, FleetParams
from ..errors import config_error
from ..placement import Placement

ROUTINGS = 8
"""Different routings that the steps of a case cycle through. Even, so that each one always meets the same of a
transport's two buffer sets."""

PHASES = ("dispatch", "combine", "both")
GLOO_RAW = "gloo-raw"
GRAPH = "+graph"
"""After a transport's name: its steps replayed from CUDA graphs."""


class Routing(str, enum.Enum):
    """How tokens choose experts: all alike, or the r-th expert with a weight of 1/r."""

    UNIFORM = "uniform"
    ZIPF = "zipf"


class CombineInput(str, enum.Enum):
    """Where experts write their rows: in the transport's own buffer where it offers one, or in an ordinary tensor."""

    BUFFER = "buffer"
    TENSOR = "tensor"


@dataclass(frozen=True)
class CommCase:
    """One layout and one number of tokens.

    Args:
        world: ``W`` ranks.
        tokens: ``T`` of every rank; may be 0.
        hidden, experts, topk: ``H``, ``E``, ``K``.
        layout: how rows are received. FLAT belongs to HIGH_THROUGHPUT, the others to LOW_LATENCY.
        dtype: of the rows: float32, bfloat16 or float16.

    Raises:
        MoEEpConfigError: a value is out of range.
    """

    world: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    layout: EpLayout = EpLayout.EXPERT_MAJOR
    dtype: torch.dtype = torch.float32
    routing: Routing = Routing.UNIFORM
    combine_input: CombineInput = CombineInput.BUFFER

    phases: ClassVar[tuple[str, ...]] = PHASES
    yardsticks: ClassVar[tuple[str, ...]] = (GLOO_RAW,)
    """Candidates beside the transports."""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise config_error("tokens", self.tokens, "0 or more on each rank")
        if not 1 <= self.topk <= self.experts:
            raise config_error("topk", self.topk, f"1 to {self.experts}, the number of experts")
        _ = self.params

    @property
    def params(self) -> FleetParams:
        """Parameters of the smallest Fleet that serves this case."""
        high = self.layout is EpLayout.FLAT
        return FleetParams(
            num_experts=self.experts,
            max_tokens_per_rank=max(1, self.tokens),
            token_hidden_size=self.hidden,
            dtype_bytes=self.dtype.itemsize,
            algorithm=EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY,
            layout=self.layout,
            max_topk=self.topk,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The case in the words of a record."""
        return {
            "what": "comm",
            "layout": self.layout.value,
            "world": self.world,
            "tokens": self.tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "hidden": self.hidden,
            "experts": self.experts,
            "topk": self.topk,
            "routing": self.routing.value,
            "combine_input": self.combine_input.value,
        }

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.layout.value}, {self.tokens} tokens"

    def x(self, rank: int) -> torch.Tensor:
        """``[T, H]``: what ``rank`` sends in every step."""
        return torch.randn(self.tokens, self.hidden, generator=_generator(rank, ROUTINGS)).to(self.dtype)

    def routed(self, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 ``[T, K]``, all different, and weights float32 ``[T, K]`` of ``rank`` in routing ``number``."""
        uniform = torch.rand(self.tokens, self.experts, generator=_generator(rank, number))
        if self.routing is Routing.ZIPF:
            uniform = uniform.double().log() * torch.arange(1, self.experts + 1)  # the largest win: log(u) / weight
        scores, ids = uniform.topk(self.topk)
        return ids, scores.float().softmax(-1)

    def rows(self, number: int) -> torch.Tensor:
        """int64 ``[W, W]``: rows from each rank to each in routing ``number``, one per (token, destination rank)."""
        owner = Placement.contiguous(self.experts, self.world).owner_table
        return torch.stack(
            [_destinations(owner[self.routed(rank, number)[0]], self.world) for rank in range(self.world)]
        )


@dataclass(frozen=True)
class Payload:
    """Bytes of rows that leave a rank for other ranks in one step: ``mean`` over ranks, ``most`` of the busiest."""

    mean: int
    most: int


@cache
def payload(case: CommCase) -> dict[str, Payload]:
    """What each phase has to move: a row for each (token, rank that serves it), there and back. Rows that a rank
    keeps for itself do not count, nor do ids, weights and headers."""
    rows = torch.stack([case.rows(number) for number in range(ROUTINGS)]).double().mean(0)
    rows.fill_diagonal_(0)
    leaving = {"dispatch": rows.sum(1), "combine": rows.sum(0), "both": rows.sum(1) + rows.sum(0)}
    row_bytes = case.hidden * case.dtype.itemsize
    return {
        phase: Payload(round(float(n.mean()) * row_bytes), round(float(n.max()) * row_bytes))
        for phase, n in leaving.items()
    }


def _destinations(owner_TK: torch.Tensor, world: int) -> torch.Tensor:
    """int64 ``[W]``: how many tokens have a slot on each rank."""
    return torch.zeros(len(owner_TK), world, dtype=torch.bool).scatter_(1, owner_TK, True).sum(0)


def _generator(rank: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank * (ROUTINGS + 1) + number)
