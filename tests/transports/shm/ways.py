"""Steps of one rank whose result is known, on a handle that is used again and again."""

from __future__ import annotations

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    Fleet,
    Handle,
    HandleAlgoKnobTopKWeights,
    HandleParams,
)
from tests.transports.shm.ranks import EXPERTS, HIDDEN, TOPK

T = 5
ALONE = BootstrapConfig(1, 0, device="cpu")
LAYOUTS = pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
X = torch.linspace(-1, 1, T * HIDDEN).view(T, HIDDEN)
WEIGHTS = torch.linspace(0.25, 4, T * TOPK).view(T, TOPK)


def routing(number: int, layout: EpLayout = EpLayout.EXPERT_MAJOR) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, weights, and what comes of ``X`` where experts return their rows unchanged, on one rank."""
    ids = (torch.arange(T * TOPK).view(T, TOPK) * (1 + number % 4) + number) % (EXPERTS + 1) - 1
    weights = WEIGHTS + number
    times = weights * (ids >= 0) if layout is EpLayout.EXPERT_MAJOR else (ids >= 0).any(1, keepdim=True).float()
    return ids, weights, X * times.sum(1, keepdim=True)


def step(handle: Handle, number: int, x: torch.Tensor = X) -> torch.Tensor:
    ids, weights, _ = routing(number)
    handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
    out = handle.dispatch(DispatchInputParams([x]))
    return handle.combine(CombineInputParams([out.expert_tensors])).x


def warm(fleet: Fleet, steps: int = 4) -> Handle:
    ids, weights, _ = routing(0)
    handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
    for number in range(steps):
        step(handle, number)
    return handle
