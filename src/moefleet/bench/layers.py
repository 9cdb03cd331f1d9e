"""One MoE layer with the experts of a model: what is measured, and how a rank measures it on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from ..config import BootstrapConfig, EpLayout, GroupedGemmConfig, SplitConfig
from ..errors import config_error
from ..layer import MoEEpLayer
from ..placement import Placement
from ..reference import expert_mlp, tolerance
from ..tensors import MoEEpTensors
from ..timing import PHASES
from ..weights import MoEWeightPack, MoEWeights
from .cases import ROUTINGS, CommCase
from .cpu import Candidate, Times


@dataclass(frozen=True)
class LayerCase(CommCase):
    """One layout and one number of tokens, with experts that compute.

    Args:
        intermediate: ``I`` of each expert; their activation is SiLU.
        model: whose sizes these are, for people.
    """

    intermediate: int = 1
    model: str = ""

    phases: ClassVar[tuple[str, ...]] = (*PHASES, "total")
    yardsticks: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate < 1:
            raise config_error("intermediate", self.intermediate, "at least 1")

    @property
    def facts(self) -> dict[str, Any]:
        """The case in the words of a record."""
        facts = {**super().facts, "what": "layer", "intermediate": self.intermediate, "model": self.model}
        del facts["combine_input"]
        return facts

    @property
    def weight_bytes(self) -> int:
        """Bytes of the experts of all ranks."""
        return 3 * self.experts * self.hidden * self.intermediate * self.dtype.itemsize

    def expert(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of one expert: w13 ``[2I, H]`` and w2 ``[H, I]``, of which rows keep the size of what they get."""
        generator = torch.Generator().manual_seed(number)

        def uniform(rows: int, columns: int) -> torch.Tensor:
            most = math.sqrt(3 / columns)
            return torch.empty(rows, columns, dtype=self.dtype).uniform_(-most, most, generator=generator)

        return uniform(2 * self.intermediate, self.hidden), uniform(self.hidden, self.intermediate)

    def weights(self, rank: int) -> MoEWeights:
        """The experts of one rank."""
        own = Placement.contiguous(self.experts, self.world).experts_of(rank)
        w13 = torch.empty(len(own), 2 * self.intermediate, self.hidden, dtype=self.dtype)
        w2 = torch.empty(len(own), self.hidden, self.intermediate, dtype=self.dtype)
        for place, number in enumerate(own):
            w13[place], w2[place] = self.expert(number)
        return MoEWeightPack(w13, w2)

    def expected(self, rank: int) -> tuple[torch.Tensor, float]:
        """What a rank must get in each routing, float64 ``[ROUTINGS, T, H]``, and the largest number on the way."""
        x, routed = self.x(rank), [self.routed(rank, number) for number in range(ROUTINGS)]
        y, largest = torch.zeros(ROUTINGS, self.tokens, self.hidden, dtype=torch.float64), 0.0
        for expert in torch.cat([ids for ids, _ in routed]).unique().tolist():
            rows = expert_mlp(x, *self.expert(expert))
            largest = max(largest, float(rows.abs().max()))
            for place, (ids, weights) in enumerate(routed):
                y[place] += rows * torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True)
        return y, largest


# A rank keeps the last: cases that differ in what they do not depend on share them.
_weights = lru_cache(maxsize=1)(lambda case, rank: case.weights(rank))
_expected = lru_cache(maxsize=1)(lambda case, rank: case.expected(rank))


class LayerCandidate(Candidate):
    """A :class:`~moefleet.MoEEpLayer` over one transport, timed by itself."""

    def __init__(self, name: str, case: LayerCase, bootstrap: BootstrapConfig) -> None:
        self._case, self._rank = case, bootstrap.rank
        self._layer = MoEEpLayer(
            bootstrap,
            case.params,
            _weights(replace(case, layout=EpLayout.EXPERT_MAJOR, tokens=0), self._rank),
            backend=SplitConfig(name, GroupedGemmConfig("silu")),
        )
        self._layer.enable_timing()
        x = case.x(self._rank)
        self._inputs = [MoEEpTensors(x, *case.routed(self._rank, number)) for number in range(ROUTINGS)]

    def prepare(self, number: int, validate: bool) -> float | None:
        y = self._layer(self._inputs[number % ROUTINGS])
        if not validate:
            return None
        if not y.numel():
            return 0.0
        case = self._case
        expected, largest = _expected(replace(case, layout=EpLayout.EXPERT_MAJOR), self._rank)
        allowed = tolerance(case.dtype, case.world, case.topk, largest)
        error = float((y.double() - expected[number % ROUTINGS]).abs().max()) / allowed
        return math.inf if math.isnan(error) else error

    def step(self, number: int) -> Times:
        self._layer(self._inputs[number % ROUTINGS])
        return tuple(milliseconds / 1000 for milliseconds in self._layer.last_timings_ms.values())

    def close(self) -> None:
        self._layer.destroy()


def layer_candidate(name: str, case: LayerCase, bootstrap: BootstrapConfig) -> Candidate:
    """The candidate of this name."""
    return LayerCandidate(name, case, bootstrap)
