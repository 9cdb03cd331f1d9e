"""What kernels count for Fleet.stats(), under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from moefleet import EpLayout, reference
from tests.strategies import LAYOUTS, make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("on a GPU test_gpu_steps.py looks at what Fleets count", allow_module_level=True)

from tests.transports.nvlink.simulate import World

EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())


def run(world: World, problem, times: int) -> None:
    for _ in range(times):
        slots = world.update(problem)
        outs = world.dispatch(slots, problem)
        world.combine(slots, problem, [out.expert_tensors for out in outs])
        for engine, slot in zip(world.engines, slots, strict=True):
            engine.return_slot(slot)


@EACH_LAYOUT
def test_rows_of_ranks_and_experts(layout: EpLayout) -> None:
    problem = make_problem(5, 2, 5, 4, 3, [4, 2], torch.float32, "random")
    params = problem.params(layout)
    world = World(params, 2)
    run(world, problem, 2)
    outs, first = reference.dispatch(problem.xs, *problem.routing, params), (0, 3, 5)
    there = [
        [int(((ids >= first[to]) & (ids < first[to + 1])).any(1).sum()) for to in range(2)] for ids in problem.topk_ids
    ]
    for rank, engine in enumerate(world.engines):
        words, at = engine.control.tolist(), engine.geometry.counts
        assert words[at.sent : at.sent + 2] == [2 * rows for rows in there[rank]]
        assert words[at.got : at.got + 2] == [2 * there[source][rank] for source in range(2)]
        assert words[at.waited : at.waited + 2] == [0, 0], "the interpreter has no clock"
        assert words[at.tokens] == 2 * problem.tokens[rank]
        if layout is EpLayout.EXPERT_MAJOR:
            rows = outs[rank].expert_counts
        else:
            ids = outs[rank].recv_topk_idx
            rows = torch.bincount(ids[ids >= 0], minlength=first[rank + 1] - first[rank])
        assert words[at.experts : at.end] == (2 * rows).tolist()


def test_nothing_is_counted_where_nobody_asked() -> None:
    problem = make_problem(5, 1, 5, 4, 3, [4], torch.float32, "random")
    world = World(problem.params(EpLayout.RANK_MAJOR), 1)
    (engine,) = world.engines
    engine.counts = None
    run(world, problem, 1)
    at = engine.geometry.counts
    assert not any(engine.control[at.got : at.end].tolist())
