"""Routing problems for every suite: what all ranks of one step hold, made from a seed.

Spawned ranks import this module and make their own part again from the same arguments, so it needs torch only;
hypothesis is imported where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moefleet.config import EpAlgorithm, EpLayout, FleetParams
from moefleet.placement import NO_OWNER, Placement

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SPECIALS = (
    "random",  # any id from -1 on, the same one twice now and then
    "distinct",  # as most routers: K different experts, -1 past the last of them
    "one_expert",  # every slot of every token names the last expert
    "one_rank",  # every slot names some expert of the first rank that has any
    "duplicates",  # a token names one expert in all of its slots
    "absent",  # nothing but -1
    "sparse",  # three slots out of four are -1
    "zipf",  # few experts are popular
    "signed",  # as random, with weights of both signs that may cancel exactly
)
LAYOUTS = tuple(EpLayout)


@dataclass(frozen=True, eq=False)
class Problem:
    """One step of ``world_size`` ranks; sequences are indexed by rank.

    ``xs`` [T, H] of the dtype asked for, ``topk_ids`` [T, K] int64, ``topk_weights`` [T, K] float32.
    """

    world_size: int
    num_experts: int
    hidden: int
    topk: int
    xs: tuple[torch.Tensor, ...]
    topk_ids: tuple[torch.Tensor, ...]
    topk_weights: tuple[torch.Tensor, ...]

    @property
    def routing(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Ids and weights, as most functions take them."""
        return self.topk_ids, self.topk_weights

    @property
    def tokens(self) -> list[int]:
        """``T`` of each rank."""
        return [len(x) for x in self.xs]

    def params(self, layout: EpLayout = EpLayout.EXPERT_MAJOR, **changes: Any) -> FleetParams:
        """Parameters of the smallest Fleet for this problem; keyword arguments replace fields."""
        high = layout is EpLayout.FLAT
        fields: dict[str, Any] = {
            "num_experts": self.num_experts,
            "max_tokens_per_rank": max(1, *self.tokens),
            "token_hidden_size": self.hidden,
            "dtype_bytes": self.xs[0].element_size(),
            "algorithm": EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY,
            "layout": layout,
            "max_topk": self.topk,
        }
        return FleetParams(**{**fields, **changes})

    def weights(self, intermediate: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts: ``w13`` [E, 2I, H] and ``w2`` [E, H, I] in the dtype of ``xs``."""
        g = torch.Generator().manual_seed(seed)
        w13 = torch.randn(self.num_experts, 2 * intermediate, self.hidden, generator=g) / self.hidden**0.5
        w2 = torch.randn(self.num_experts, self.hidden, intermediate, generator=g) / intermediate**0.5
        return w13.to(self.xs[0].dtype), w2.to(self.xs[0].dtype)


def make_problem(
    seed: int,
    world: int,
    experts: int,
    hidden: int,
    topk: int,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.float32,
    special: str = "random",
) -> Problem:
    """The same problem for the same arguments, in every process. ``special`` is one of ``SPECIALS``."""
    assert len(tokens) == world, (tokens, world)
    g = torch.Generator().manual_seed(seed)
    xs, ids, weights = [], [], []
    for count in tokens:
        xs.append(torch.randn(count, hidden, generator=g).to(dtype))
        ids.append(_ids(special, count, topk, experts, world, g))
        weight = torch.rand(count, topk, generator=g)
        if special == "signed":
            weight = torch.randint(-2, 3, (count, topk), generator=g) / 2
        weights.append(weight)
    return Problem(world, experts, hidden, topk, tuple(xs), tuple(ids), tuple(weights))


def make_placement(seed: int, experts: int, world: int) -> Placement:
    """An awkward placement: uneven blocks, experts out of order, slots without expert, experts without owner."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, 2 * -(-experts // world) + 1, (world,), generator=g).tolist()
    order = torch.randperm(sum(slots), generator=g).tolist()
    held = [slot if lucky else NO_OWNER for slot, lucky in zip(order, (torch.rand(len(order), generator=g) > 0.2))]
    return Placement(experts, tuple(slots), tuple((held + [NO_OWNER] * experts)[:experts]))


def problems(
    max_world: int = 4,
    max_experts: int = 9,
    max_topk: int = 4,
    max_tokens: int = 5,
    hidden: int = 4,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> SearchStrategy[Problem]:
    """A hypothesis strategy of small problems: ranks without tokens, ranks without experts and all specials."""
    from hypothesis import strategies as st

    def build(draw: Any) -> Problem:
        world = draw(st.integers(1, max_world))
        return make_problem(
            draw(st.integers(0, 2**16)),
            world,
            draw(st.integers(1, max_experts)),
            hidden,
            draw(st.integers(1, max_topk)),
            draw(st.lists(st.integers(0, max_tokens), min_size=world, max_size=world)),
            draw(st.sampled_from(dtypes)),
            draw(st.sampled_from(SPECIALS)),
        )

    return st.composite(build)()


def _ids(special: str, count: int, topk: int, experts: int, world: int, g: torch.Generator) -> torch.Tensor:
    shape = (count, topk)
    if special in ("random", "signed"):
        return torch.randint(-1, experts, shape, generator=g)
    if special == "distinct":
        order = torch.rand(count, experts, generator=g).argsort(1)[:, :topk]
        return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1)
    if special == "one_expert":
        return torch.full(shape, experts - 1)
    if special == "one_rank":
        return torch.randint(0, -(-experts // world), shape, generator=g)  # the first rank's block is the largest
    if special == "duplicates":
        return torch.randint(0, experts, (count, 1), generator=g).repeat(1, topk)
    if special == "absent":
        return torch.full(shape, -1)
    if special == "sparse":
        ids = torch.randint(0, experts, shape, generator=g)
        return torch.where(torch.rand(shape, generator=g) < 0.25, ids, -1)
    if special == "zipf":
        popularity = 1 / torch.arange(1, experts + 1, dtype=torch.float32)
        return (
            torch.multinomial(popularity, count * topk, replacement=True, generator=g).reshape(shape)
            if count
            else (torch.empty(shape, dtype=torch.int64))
        )
    raise ValueError(f"special: got {special!r}, allowed {', '.join(SPECIALS)}")
