"""One step of a small Fleet, for tests that are about what happens around it."""

from __future__ import annotations

import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpAlgorithm,
    EpLayout,
    Fleet,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    ShmConfig,
    create_fleet,
)
from tests.strategies import make_problem

EXPERTS, HIDDEN, TOPK, MOST = 6, 64, 3, 8


def fleet_of(
    bootstrap: BootstrapConfig, layout: EpLayout = EpLayout.EXPERT_MAJOR, place_bytes: int | None = None
) -> Fleet:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    params = FleetParams(EXPERTS, MOST, HIDDEN, 4, algorithm, layout, max_topk=TOPK)
    return create_fleet(bootstrap, params, backend=ShmConfig(place_bytes=place_bytes))


def step(fleet: Fleet, seed: int = 0) -> torch.Tensor:
    rank, world = fleet.bootstrap.rank, fleet.bootstrap.world_size
    tokens = [(seed + 3 * peer) % (MOST + 1) for peer in range(world)]
    problem = make_problem(seed, world, EXPERTS, HIDDEN, TOPK, tokens)
    knobs = [HandleAlgoKnobTopKWeights(problem.topk_weights[rank])]
    with fleet.create_handle(HandleParams(problem.topk_ids[rank]), knobs) as handle:
        out = handle.dispatch(DispatchInputParams([problem.xs[rank]]))
        return handle.combine(CombineInputParams([out.expert_tensors])).x
