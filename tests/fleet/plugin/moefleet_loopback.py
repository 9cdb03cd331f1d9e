"""Somebody else's package: two transports that moefleet knows from entry points alone.

``loopback`` is a Fleet of one rank with nothing but what is abstract. ``relay`` is shared memory under another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moefleet import (
    Capability,
    CombineInputParams,
    CombineOutput,
    DispatchInputParams,
    DispatchOutput,
    EpLayout,
    Fleet,
    Handle,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    Limits,
    reference,
)
from moefleet.knobs import HandleAlgoKnob
from moefleet.routing import check_topk_ids
from moefleet.transports.shm import ShmFleet

CPU = torch.device("cpu")
LIMITS = Limits(device_types=frozenset({"cpu"}), layouts=frozenset(EpLayout), max_world_size=1)


class LoopbackFleet(Fleet):
    @classmethod
    def probe(cls) -> Capability:
        return Capability(True, features=frozenset({"canonical_order"}), limits=LIMITS)

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> Handle:
        return LoopbackHandle(self, params, algo_knobs)

    def destroy(self) -> None:
        pass


class LoopbackHandle(Handle):
    def __init__(self, fleet: LoopbackFleet, params: HandleParams, knobs: Sequence[HandleAlgoKnob]) -> None:
        self._fleet = fleet
        self.update(params, knobs)

    def update(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> None:
        for knob in algo_knobs:
            assert isinstance(knob, HandleAlgoKnobTopKWeights)
            self._given = knob.weights
        self._ids = check_topk_ids(params.topk_ids, self._fleet.params, CPU).clone()
        self._weights = self._given.clone()

    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        scales: Any = [params.x[1]] if len(params.x) > 1 else None
        routing = [self._ids], [self._weights]
        return reference.dispatch([params.x[0]], *routing, self._fleet.params, scales=scales)[0]

    def combine(self, params: CombineInputParams) -> CombineOutput:
        (y,) = reference.combine([params.x[0]], [self._ids], [self._weights], self._fleet.params)
        assert y is not None
        return CombineOutput(y if params.out is None else params.out.copy_(y))

    def destroy(self) -> None:
        pass


class RelayFleet(ShmFleet):
    pass
