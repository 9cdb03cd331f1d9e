"""New routing for a handle: the quick way takes what is plain, the long way the rest, and both say the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpConfigError,
)
from tests.transports.shm.ranks import EXPERTS, HIDDEN, TOPK, fleet_of

T = 5
FIRST = torch.zeros(T, TOPK, dtype=torch.int64), torch.ones(T, TOPK)
IDS = torch.arange(T * TOPK).view(T, TOPK) % (EXPERTS + 1) - 1
WEIGHTS = torch.linspace(0.25, 4, T * TOPK).view(T, TOPK)
X = torch.linspace(-1, 1, T * HIDDEN).view(T, HIDDEN)
EXPECTED = X * (WEIGHTS * (IDS >= 0)).sum(1, keepdim=True)

KINDS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "plain": (IDS, WEIGHTS),
    "int32": (IDS.int(), WEIGHTS),
    "columns": (IDS.T.contiguous().T, WEIGHTS.T.contiguous().T),
    "float64": (IDS, WEIGHTS.double()),
    "gradient": (IDS, WEIGHTS.clone().requires_grad_()),
}


@pytest.mark.parametrize("ids, weights", KINDS.values(), ids=KINDS)
def test_every_kind_of_routing(ids: torch.Tensor, weights: torch.Tensor) -> None:
    with fleet_of(BootstrapConfig(1, 0, device="cpu")) as fleet:
        handle = fleet.create_handle(HandleParams(FIRST[0]), [HandleAlgoKnobTopKWeights(FIRST[1])])
        for _ in range(2):
            handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
            rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
            torch.testing.assert_close(handle.combine(CombineInputParams([rows])).x, EXPECTED)


def test_weights_given_before_are_read_again() -> None:
    with fleet_of(BootstrapConfig(1, 0, device="cpu")) as fleet:
        weights = FIRST[1].clone()
        handle = fleet.create_handle(HandleParams(IDS), [HandleAlgoKnobTopKWeights(weights)])
        weights.copy_(WEIGHTS)
        handle.update(HandleParams(IDS))
        rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
        torch.testing.assert_close(handle.combine(CombineInputParams([rows])).x, EXPECTED)


WRONG: dict[str, tuple[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "id": ("expert id 6", lambda: (IDS + 1, WEIGHTS)),
    "tokens": ("which this handle was created with", lambda: (IDS[1:], WEIGHTS[1:])),
    "id type": ("torch.int16", lambda: (IDS.short(), WEIGHTS)),
    "weights": ("HandleAlgoKnobTopKWeights.weights", lambda: (IDS, WEIGHTS[1:])),
}


@pytest.mark.parametrize("message, make", WRONG.values(), ids=WRONG)
def test_a_refused_update_changes_nothing(message: str, make: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    with fleet_of(BootstrapConfig(1, 0, device="cpu")) as fleet:
        handle = fleet.create_handle(HandleParams(IDS), [HandleAlgoKnobTopKWeights(WEIGHTS)])
        ids, weights = make()
        with pytest.raises(MoEEpConfigError, match=message):
            handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
        assert fleet.stats()["failed_steps"] == 1
        rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
        torch.testing.assert_close(handle.combine(CombineInputParams([rows])).x, EXPECTED)


def test_another_knob_goes_the_long_way() -> None:
    with fleet_of(BootstrapConfig(1, 0, device="cpu")) as fleet:
        handle = fleet.create_handle(HandleParams(IDS), [HandleAlgoKnobTopKWeights(WEIGHTS)])
        handle.update(HandleParams(IDS), [HandleAlgoKnobNumReceivedTokens(T + 1)])
        with pytest.raises(MoEEpConfigError, match="HandleAlgoKnobNumReceivedTokens"):
            handle.dispatch(DispatchInputParams([X]))
