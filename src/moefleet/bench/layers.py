"""One MoE layer with the experts of a model: what is measured, and how a rank measures it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch

from ..config import BootstrapConfig, EpLayout, GroupedGemmConfig, SplitConfig
from ..errors import config_error
from ..layer import MoEEpLayer
from ..placement import Placement
from ..reference import expert_mlp, tolerance
from ..tensors import MoEEpTensors
from ..timing import PHASES
from ..weights import MoEWeightPack, MoEWeights
from .cases import GRAPH, ROUTINGS, CommCase
from .rank import Candidate, Times

Device: TypeAlias = "torch.device | str"


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
    def why_not_captured(self) -> str:
        """Why experts of these sizes cannot run in a graph, see :mod:`moefleet.kernels.grouped_gemm`."""
        if self.dtype is torch.bfloat16 and not (self.hidden % 8 or self.intermediate % 8):
            return ""
        return "experts run without the host in bfloat16 only, with H and I multiples of 8"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return 3 * self.hidden * self.intermediate * self.dtype.itemsize

    def expert(self, number: int, device: Device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of one expert: w13 ``[2I, H]`` and w2 ``[H, I]``, of which rows keep the size of what they get.

        They are made where they are needed: each kind of device has its own random numbers.
        """
        generator = torch.Generator(device).manual_seed(number)

        def uniform(rows: int, columns: int) -> torch.Tensor:
            most = math.sqrt(3 / columns)
            empty = torch.empty(rows, columns, dtype=self.dtype, device=device)
            return empty.uniform_(-most, most, generator=generator)

        return uniform(2 * self.intermediate, self.hidden), uniform(self.hidden, self.intermediate)

    def weights(self, rank: int, device: Device = "cpu") -> MoEWeights:
        """The experts of one rank."""
        own = Placement.contiguous(self.experts, self.world).experts_of(rank)
        w13 = torch.empty(len(own), 2 * self.intermediate, self.hidden, dtype=self.dtype, device=device)
        w2 = torch.empty(len(own), self.hidden, self.intermediate, dtype=self.dtype, device=device)
        for place, number in enumerate(own):
            w13[place], w2[place] = self.expert(number, device)
        return MoEWeightPack(w13, w2)

    def inputs(self, rank: int, device: Device = "cpu") -> list[MoEEpTensors]:
        """What a rank brings in each routing."""
        x = self.x(rank).to(device)
        routed = (self.routed(rank, number) for number in range(ROUTINGS))
        return [MoEEpTensors(x, ids.to(device), weights.to(device)) for ids, weights in routed]

    def expected(self, rank: int, device: Device = "cpu") -> tuple[torch.Tensor, float]:
        """What a rank must get in each routing, float64 ``[ROUTINGS, T, H]``, and the largest number on the way."""
        steps = self.inputs(rank, device)
        x = steps[0].hidden_states
        y, largest = torch.zeros(ROUTINGS, *x.shape, dtype=torch.float64, device=device), 0.0
        for expert in torch.cat([step.topk_ids for step in steps]).unique().tolist():
            rows = expert_mlp(x, *self.expert(expert, device))
            largest = max(largest, float(rows.abs().max()))
            for sum_TH, step in zip(y, steps):
                sum_TH += rows * torch.where(step.topk_ids == expert, step.topk_weights, 0.0).sum(1, keepdim=True)
        return y, largest


# A rank keeps the last: cases that differ in what they do not depend on share them.
_weights = lru_cache(maxsize=1)(lambda case, rank, device: case.weights(rank, device))
_expected = lru_cache(maxsize=1)(lambda case, rank, device: case.expected(rank, device))


class LayerCandidate(Candidate):
    """A :class:`~moefleet.MoEEpLayer` over one transport, timed by itself.

    On a GPU the step that is timed follows another one, in which the GPUs come together and the host can get ahead of
    its own, as in a model whose layers follow each other.
    """

    def __init__(self, transport: str, case: LayerCase, bootstrap: BootstrapConfig) -> None:
        self._case, self._rank, self._device = case, bootstrap.rank, torch.device(bootstrap.device or "cpu")
        self._layer = MoEEpLayer(
            bootstrap,
            case.params,
            _weights(replace(case, layout=EpLayout.EXPERT_MAJOR, tokens=0), self._rank, self._device),
            backend=SplitConfig(transport, GroupedGemmConfig("silu")),
        )
        self._layer.enable_timing()
        self._inputs = case.inputs(self._rank, self._device)

    def prepare(self, number: int, validate: bool) -> float | None:
        y = self._forward(number)
        if not validate:
            return None
        if not y.numel():
            return 0.0
        case = self._case
        expected, largest = _expected(replace(case, layout=EpLayout.EXPERT_MAJOR), self._rank, self._device)
        allowed = tolerance(case.dtype, case.world, case.topk, largest)
        error = float((y.double() - expected[number % ROUTINGS]).abs().max()) / allowed
        return math.inf if math.isnan(error) else error

    def step(self, number: int) -> Times:
        if self._device.type == "cuda":
            self._forward(number)
        self._forward(number)
        return tuple(milliseconds / 1000 for milliseconds in self._layer.last_timings_ms.values())

    def close(self) -> None:
        self._layer.destroy()

    def _forward(self, number: int) -> torch.Tensor:
        y: torch.Tensor = self._layer(self._inputs[number % ROUTINGS])
        return y


class CapturedCandidate(LayerCandidate):
    """The same layer's forwards as CUDA graphs, one for each routing: only the whole of each is timed."""

    def __init__(self, transport: str, case: LayerCase, bootstrap: BootstrapConfig) -> None:
        super().__init__(transport, case, bootstrap)
        self._captured = [self._layer.capture(inputs) for inputs in self._inputs]
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def step(self, number: int) -> Times:
        self._forward(number)
        self._begin.record()
        self._forward(number)
        self._end.record()
        self._end.synchronize()
        return (*(math.nan for _ in PHASES), self._begin.elapsed_time(self._end) / 1000)

    def _forward(self, number: int) -> torch.Tensor:
        return self._captured[number % ROUTINGS].replay()


def layer_candidate(name: str, case: LayerCase, bootstrap: BootstrapConfig) -> Candidate:
    """The candidate of this name."""
    transport, graph, _ = name.partition(GRAPH)
    return (CapturedCandidate if graph else LayerCandidate)(transport, case, bootstrap)
