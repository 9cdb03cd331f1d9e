"""Steps whose right answer every rank knows: their data follows from a seed and the step's number."""

from __future__ import annotations

from functools import cache

import torch

from .. import reference
from ..config import CommConfig, EpAlgorithm, EpLayout, FleetParams, ShmConfig
from ..placement import Placement
from ..weights import UnquantizedMoEWeights

EXPERTS, HIDDEN, INTERMEDIATE, TOPK, MOST_TOKENS = 12, 16, 8, 3, 6
PLACED_BYTES = 4 * HIDDEN * MOST_TOKENS // 2
"""Of a rank's tokens: about half of the ranks bring more."""

LARGEST = 32.0
"""No element of a row or of an output is larger."""


def params(layout: EpLayout) -> FleetParams:
    """The Fleet of the workload, float32 rows."""
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    return FleetParams(EXPERTS, MOST_TOKENS, HIDDEN, dtype_bytes=4, algorithm=algorithm, layout=layout, max_topk=TOPK)


def comm(transport: str, seed: int) -> str | CommConfig:
    """The transport of a round. Rows of so small steps would hardly be placed, so in many rounds they are made to."""
    return ShmConfig(place_bytes=(None, 0, PLACED_BYTES)[seed % 3]) if transport == ShmConfig.name else transport


@cache
def all_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """``w13`` [E, 2I, H] and ``w2`` [E, H, I]."""
    g = torch.Generator().manual_seed(1)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g) / HIDDEN**0.5
    return w13, torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g) / INTERMEDIATE**0.5


@cache
def placement(world: int) -> Placement:
    """The default one, with its tables made once."""
    return Placement.contiguous(EXPERTS, world)


def weights_of(rank: int, world: int) -> UnquantizedMoEWeights:
    """What a rank holds under the default placement."""
    w13, w2 = all_weights()
    held = list(placement(world).experts_of(rank))
    return UnquantizedMoEWeights(w13[held], w2[held])


def inputs(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank brings to a step: ``x`` [T, H], ids [T, K], weights [T, K]; T is 0 now and then."""
    g = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
    count = int(torch.randint(0, MOST_TOKENS + 1, (1,), generator=g))
    x = torch.randn(count, HIDDEN, generator=g)
    ids = torch.randint(-1, EXPERTS, (count, TOPK), generator=g)
    return x, ids, torch.rand(count, TOPK, generator=g)


def wrong_rows(seed: int, step: int, rank: int, mask: list[int], output: torch.Tensor) -> int:
    """How many rows of a rank's output differ from the reference under this mask."""
    mine = inputs(seed, step, rank)
    nobody = [part[:0] for part in mine]
    parts = [mine if other == rank else nobody for other in range(len(mask))]
    xs, ids, weights = ([part[i] for part in parts] for i in range(3))
    expected = reference.forward(xs, ids, weights, *all_weights(), placement=placement(len(mask)), mask=mask)[rank]
    assert expected is not None
    allowed = reference.tolerance(torch.float32, len(mask), TOPK, LARGEST)
    bad = ~((output.double() - expected).abs() <= allowed).all(1)  # NaN is wrong
    return int(bad.sum())
