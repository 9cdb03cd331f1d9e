"""Ranks that bring another K or row type to a step are told so with what they brought, on either way."""

from __future__ import annotations

import pytest
import torch

from moefleet import EpLayout
from tests.strategies import LAYOUTS, make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU: the conformance suite does this", allow_module_level=True)

from moefleet.transports.nvlink.alarm import to_error
from tests.transports.nvlink.simulate import World

EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())


def told(world: World) -> list[str]:
    return [str(to_error(word, 9, 1.0)) if word else "" for word in world.alarms()]


@EACH_LAYOUT
def test_another_row_type_in_dispatch(layout: EpLayout) -> None:
    problem = make_problem(2, 2, 4, 4, 2, [3, 2], torch.bfloat16, "distinct")
    world = World(problem.params(layout), 2)
    slots, (ours, theirs) = world.update(problem), problem.xs
    for send in (True, False):
        for engine, slot, x in zip(world.engines, slots, (ours, theirs.half()), strict=True):
            engine.bind_dispatch(slot, x, 2, engine.outputs[0], send, not send)(0, x)
    first, second = told(world)
    assert "rank 1 brought K = 2 and torch.float16 to step 1" in first
    assert "rank 0 brought K = 2 and torch.bfloat16 to step 1" in second


@EACH_LAYOUT
def test_another_row_type_in_combine(layout: EpLayout) -> None:
    """It would be read as if it were this rank's own."""
    problem = make_problem(2, 2, 4, 4, 2, [3, 2], torch.bfloat16, "distinct")
    world = World(problem.params(layout), 2)
    slots = world.update(problem)
    outs = world.dispatch(slots, problem)
    assert told(world) == ["", ""]
    rows = [outs[0].expert_tensors.nan_to_num(), outs[1].expert_tensors.nan_to_num().half()]
    homes = [torch.zeros(x.shape, dtype=row.dtype) for x, row in zip(problem.xs, rows, strict=True)]
    for send in (True, False):
        for engine, slot, row, home in zip(world.engines, slots, rows, homes, strict=True):
            engine.bind_combine(slot, row, home, 2, send, not send)(0, row, home)
    first, second = told(world)
    assert "rank 1 brought torch.float16 for combine to step 1" in first
    assert "rank 0 brought torch.bfloat16 for combine to step 1" in second
