"""What a shm Fleet counts: whatever moved, by the definitions in Fleet.stats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpAlgorithm,
    EpLayout,
    Fleet,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpError,
    create_fleet,
)
from tests.conformance.pool import shared_pool

W, EXPERTS, HIDDEN, MOST, SCALES = 2, 4, 8, 8, 4
ROW = HIDDEN * 4
KEYS = {
    "steps", "failed_steps", "tokens", "tokens_per_expert", "rows_received", "rows_sent", "bytes_received",
    "bytes_sent", "waited_s", "bad_ids", "native",
}  # fmt: skip

# Experts 0 and 1 are rank 0's. Rank 0 sends 3 tokens to itself and 1 to rank 1; rank 1 sends 1 and 2, and 1 nowhere.
IDS = ([[0, 1], [1, 0], [0, 3]], [[2, 3], [3, 0], [-1, -1]])
PER_EXPERT = ([4, 2], [1, 3])
TAKEN = ([3, 1], [1, 2])


def params_for(layout: EpLayout, scales: int = 0) -> FleetParams:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    return FleetParams(EXPERTS, MOST, HIDDEN, 4, algorithm, layout, scale_bytes_per_token=scales)


def step(fleet: Fleet, ids: list[list[int]], hidden: int = HIDDEN) -> None:
    weights = torch.ones(len(ids), 2)
    with fleet.create_handle(HandleParams(torch.tensor(ids)), [HandleAlgoKnobTopKWeights(weights)]) as handle:
        x = [torch.zeros(len(ids), hidden)]
        if fleet.params.scale_bytes_per_token:
            x.append(torch.zeros(len(ids), SCALES, dtype=torch.uint8))
        out = handle.dispatch(DispatchInputParams(x))
        handle.combine(CombineInputParams([torch.zeros_like(out.expert_tensors)]))


def three_steps(bootstrap: BootstrapConfig, params: FleetParams, tolerant: bool) -> dict[str, Any]:
    knobs = [FleetAlgoKnobFaultTolerance(timeout_ms=20_000)] if tolerant else []
    with create_fleet(bootstrap, params, knobs, "shm") as fleet:
        assert fleet.stats()["steps"] == 0
        for _ in range(3):
            step(fleet, IDS[bootstrap.rank])
        stats = fleet.stats()
    assert fleet.stats() == stats, "the last counts, after destroy"
    return stats


@pytest.mark.parametrize("layout", list(EpLayout), ids=str)
@pytest.mark.parametrize(("scales", "tolerant"), [(0, False), (SCALES, True)])
def test_what_moved_is_counted(layout: EpLayout, scales: int, tolerant: bool) -> None:
    for result in shared_pool().run(three_steps, params_for(layout, scales), tolerant, world_size=W):
        assert result.error is None, result.error
        rank, stats = result.rank, result.value
        assert set(stats) == KEYS
        taken, given = [[3 * n for n in TAKEN[rank]], [3 * TAKEN[peer][rank] for peer in range(W)]]
        assert (stats["rows_received"], stats["rows_sent"]) == (taken, given)
        assert stats["tokens_per_expert"] == [3 * n for n in PER_EXPERT[rank]]
        assert (stats["steps"], stats["failed_steps"], stats["tokens"], stats["bad_ids"]) == (3, 0, 9, 0)
        there, back = ROW + scales, ROW
        assert stats["bytes_received"] == [n * there + m * back for n, m in zip(taken, given, strict=True)]
        assert stats["bytes_sent"] == [m * there + n * back for n, m in zip(taken, given, strict=True)]
        assert len(stats["waited_s"]) == W
        assert stats["waited_s"][rank] == 0.0


def failing(bootstrap: BootstrapConfig, params: FleetParams) -> dict[str, Any]:
    """Rank 0 gives up: rows of a wrong width, an id out of range, a handle destroyed before it was combined."""
    with create_fleet(bootstrap, params, (), "shm") as fleet:
        ids = IDS[bootstrap.rank]
        wrong = bootstrap.rank == 0
        step(fleet, ids)
        with pytest.raises(MoEEpError):
            step(fleet, ids, HIDDEN + 1 if wrong else HIDDEN)
        with pytest.raises(MoEEpError):
            step(fleet, [[9, 9]] * 3 if wrong else ids)
        handle = fleet.create_handle(HandleParams(torch.tensor(ids)), [HandleAlgoKnobTopKWeights(torch.ones(3, 2))])
        out = handle.dispatch(DispatchInputParams([torch.zeros(3, HIDDEN)]))
        if not wrong:
            with pytest.raises(MoEEpError):
                handle.combine(CombineInputParams([torch.zeros_like(out.expert_tensors)]))
        handle.destroy()
        step(fleet, ids)
        return fleet.stats()


def test_steps_that_failed_are_counted_on_all_ranks() -> None:
    for result in shared_pool().run(failing, params_for(EpLayout.EXPERT_MAJOR), world_size=W):
        assert result.error is None, result.error
        assert (result.value["steps"], result.value["failed_steps"]) == (5, 3)
        assert result.value["rows_sent"] == [2 * TAKEN[peer][result.rank] for peer in range(W)], "what came back"
