"""The kernels' logic against the reference, all ranks in one process under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from moefleet import EpLayout, reference
from tests.strategies import SPECIALS, Problem, make_placement, make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip(
        "kernels are compiled where there is a GPU: see benchmarks/gpu/check_nvlink.py", allow_module_level=True
    )

from moefleet.transports.nvlink.alarm import Trouble, to_error, trouble_in
from moefleet.transports.nvlink.engine import Grids
from moefleet.transports.nvlink.geometry import CONTROL
from tests.transports.nvlink.simulate import GRIDS, SPLIT_GRIDS, World

LAYOUTS = pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
TOKENS = {1: [4], 2: [4, 0], 3: [2, 5, 1]}


def scale(x: torch.Tensor, index: int) -> torch.Tensor:
    """An expert that is not the identity."""
    return x * (index + 1)


def check_step(world: World, problem: Problem, placement=None, which: int = 0) -> list[torch.Tensor]:
    """One step of all ranks: what they receive exactly, what comes home within tolerance."""
    slots = world.update(problem)
    got = world.dispatch(slots, problem, which)
    want = reference.dispatch(problem.xs, *problem.routing, world.params, placement=placement, fill=float("nan"))
    for mine, theirs in zip(got, want):
        for name in ("expert_counts", "recv_total_counter", "recv_topk_idx", "recv_topk_weights"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None and b is None) or torch.equal(a, b), (name, a, b)
        live = ~theirs.expert_tensors.isnan().any(-1)
        assert torch.equal(mine.expert_tensors[live], theirs.expert_tensors[live])
    rows = [reference.compute(out, scale, fill=float("nan")) for out in want]
    homes = world.combine(slots, problem, rows)
    expected = reference.combine(rows, *problem.routing, world.params, placement=placement)
    for y, e in zip(homes, expected):
        largest = 4 * max([1.0, *(float(r.nan_to_num().abs().max()) for r in rows if r.numel())])
        tolerance = reference.tolerance(problem.xs[0].dtype, problem.world_size, problem.topk, largest)
        assert torch.allclose(y.float(), e.float(), rtol=0, atol=tolerance)
    for engine, slot in zip(world.engines, slots):
        engine.return_slot(slot)
    assert world.alarms() == [0] * problem.world_size
    return homes


@LAYOUTS
@pytest.mark.parametrize("special", SPECIALS)
def test_routing(layout: EpLayout, special: str) -> None:
    number = SPECIALS.index(special)
    world = 1 + (number + list(EpLayout).index(layout)) % 3
    problem = make_problem(number, world, 4, 6, 3, TOKENS[world], torch.float32, special)
    check_step(World(problem.params(layout), world), problem)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(layout: EpLayout, dtype: torch.dtype) -> None:
    problem = make_problem(7, 2, 3, 5, 2, [3, 2], dtype, "distinct")
    check_step(World(problem.params(layout), 2, grids=SPLIT_GRIDS), problem)


@LAYOUTS
@pytest.mark.parametrize("grids", [GRIDS, SPLIT_GRIDS], ids=["both", "apart"])
def test_inputs_that_change_between_the_halves(layout: EpLayout, grids: tuple[Grids, Grids]) -> None:
    problem = make_problem(8, 2, 5, 4, 3, [3, 6])
    check_step(World(problem.params(layout), 2, grids=grids, staged=True), problem)


@LAYOUTS
def test_senders_and_receivers_apart(layout: EpLayout) -> None:
    problem = make_problem(8, 3, 7, 4, 3, [3, 6, 2])
    check_step(World(problem.params(layout), 3, grids=SPLIT_GRIDS), problem)


@LAYOUTS
def test_rows_of_more_than_one_block(layout: EpLayout) -> None:
    problem = make_problem(9, 2, 3, 8200, 2, [2, 2], torch.float32, "distinct")
    check_step(World(problem.params(layout), 2), problem)


@LAYOUTS
def test_ranks_without_experts(layout: EpLayout) -> None:
    problem = make_problem(10, 3, 2, 4, 2, [2, 3, 3])
    check_step(World(problem.params(layout), 3), problem)


@LAYOUTS
def test_experts_anywhere(layout: EpLayout) -> None:
    problem = make_problem(11, 2, 6, 4, 3, [4, 3])
    placement = make_placement(3, 6, 2)
    check_step(World(problem.params(layout), 2, placement), problem, placement)


@LAYOUTS
def test_steps_of_other_sizes_and_both_buffer_sets(layout: EpLayout) -> None:
    sizes = [[5, 2], [0, 4], [3, 5]]
    params = make_problem(0, 2, 5, 4, 3, [5, 5]).params(layout)
    world = World(params, 2)
    for number, tokens in enumerate(sizes):
        check_step(world, make_problem(20 + number, 2, 5, 4, 3, tokens, special="zipf"), which=number % 2)
    check_step(world, make_problem(30, 2, 5, 4, 2, [2, 4]))  # another K in the same memory
    steps = [int(engine.control[CONTROL.launches]) // GRIDS[0].programs for engine in world.engines]
    assert steps == [len(sizes) + 1] * 2


@LAYOUTS
def test_same_bits_again(layout: EpLayout) -> None:
    problem = make_problem(12, 2, 5, 6, 3, [4, 4])
    first = check_step(World(problem.params(layout), 2), problem)
    again = check_step(World(problem.params(layout), 2, grids=SPLIT_GRIDS), problem)
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_strided_inputs_of_other_types() -> None:
    problem = make_problem(13, 2, 5, 6, 3, [4, 3])
    plain = World(problem.params(), 2)
    want = check_step(plain, problem)
    wide = [torch.zeros(len(x), 12) for x in problem.xs]
    for w, x in zip(wide, problem.xs):
        w[:, ::2] = x
    strided = Problem(
        2, 5, 6, 3, tuple(w[:, ::2] for w in wide), tuple(ids.t().contiguous().t().int() for ids in problem.topk_ids),
        tuple(torch.cat([w, w], 1)[:, :3] for w in problem.topk_weights),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(check_step(World(problem.params(), 2), strided), want))


@LAYOUTS
def test_ids_out_of_range_count_as_none_and_are_counted(layout: EpLayout) -> None:
    problem = make_problem(14, 2, 5, 4, 3, [3, 3], special="distinct")
    world = World(problem.params(layout), 2)
    wild = problem.topk_ids[0].clone()
    wild[0, 0], wild[2, 1], wild[1, 2] = 5, -7, 2**40
    tame = torch.where((wild < 0) | (wild > 4), -1, wild)
    want = check_step(world, Problem(2, 5, 4, 3, problem.xs, (tame, problem.topk_ids[1]), problem.topk_weights))
    slots = world.update(Problem(2, 5, 4, 3, problem.xs, (wild, problem.topk_ids[1]), problem.topk_weights))
    rows = [reference.compute(out, scale, fill=float("nan")) for out in world.dispatch(slots, problem)]
    assert all(torch.equal(a, b) for a, b in zip(world.combine(slots, problem, rows), want))
    assert [int(engine.control[CONTROL.bad_ids]) for engine in world.engines] == [3, 0]


@LAYOUTS
def test_a_rank_that_fails_before_it_sends(layout: EpLayout) -> None:
    problem = make_problem(15, 2, 4, 4, 2, [3, 3], special="distinct")
    world = World(problem.params(layout), 2)
    slots = world.update(problem)
    world.engines[1].fail(slots[1], 0, fresh=True, wait=False)
    got = world.dispatch(slots, problem, skip=(1,))
    rows = [reference.compute(out, scale, fill=float("nan")) for out in got]
    y = world.combine(slots, problem, rows, skip=(1,))[0]
    alone = torch.where(problem.topk_ids[0] < 2, problem.topk_ids[0], -1)  # experts 0 and 1 are rank 0's
    want = make_problem(15, 1, 4, 4, 2, [3], special="distinct")
    want = Problem(1, 4, 4, 2, problem.xs[:1], (alone,), problem.topk_weights[:1])
    assert torch.allclose(y, check_step(World(want.params(layout), 1), want)[0])
    word = world.alarms()[0]
    assert trouble_in(word) is Trouble.PEER_FAILED
    assert "rank 1 failed in step 1" in str(to_error(word, 0, 1.0))
    for engine in world.engines:
        engine.clear_alarm()
    check_step(world, problem)


@LAYOUTS
def test_a_rank_that_fails_before_combine(layout: EpLayout) -> None:
    problem = make_problem(16, 2, 4, 4, 2, [3, 3], special="distinct")
    world = World(problem.params(layout), 2)
    slots = world.update(problem)
    got = world.dispatch(slots, problem)
    rows = [reference.compute(out, scale, fill=float("nan")) for out in got]
    world.engines[1].fail(slots[1], 0, fresh=False, wait=False)
    y = world.combine(slots, problem, rows, skip=(1,))[0]
    assert y.isfinite().all()
    assert trouble_in(world.alarms()[0]) is Trouble.PEER_FAILED
    for engine in world.engines:
        engine.clear_alarm()
    check_step(world, problem)


@LAYOUTS
def test_a_rank_that_does_not_come(layout: EpLayout) -> None:
    problem = make_problem(17, 3, 6, 4, 2, [3, 3, 3], special="distinct")
    world = World(problem.params(layout), 3)
    world.dispatch(world.update(problem), problem, skip=(2,))
    for word in world.alarms()[:2]:
        assert trouble_in(word) is Trouble.TIMEOUT_DISPATCH
        error = to_error(word, 0, 1.0)
        assert error.ranks == (2,) and "rank 2 did not come to dispatch of step 1" in str(error)
    assert int(world.engines[0].control[CONTROL.budget_ns]) == 0  # no later wait lasts


@LAYOUTS
def test_a_rank_that_ended(layout: EpLayout) -> None:
    problem = make_problem(21, 2, 4, 4, 2, [3, 2], special="distinct")
    world = World(problem.params(layout), 2)
    slots = world.update(problem)
    got = world.dispatch(slots, problem)
    world.combine(slots, problem, [reference.compute(out, scale) for out in got], skip=(0,))
    world.engines[1].depart(0)  # rank 0 is late, and still gets all of the step that rank 1 took part in
    y = torch.full_like(problem.xs[0], float("nan"))
    rows = reference.compute(got[0], scale)
    for send in (True, False):
        world.engines[0].bind_combine(slots[0], rows, y, 2, send, not send)(0, rows, y)
    assert world.alarms()[0] == 0
    assert torch.allclose(y, check_step(World(problem.params(layout), 2), problem)[0])
    world.dispatch(slots, problem, skip=(1,))
    word = world.alarms()[0]
    assert trouble_in(word) is Trouble.PEER_GONE
    assert "rank 1 destroyed its Fleet before step 2" in str(to_error(word, 0, 1.0))


def test_too_many_rows_for_the_declared_room() -> None:
    problem = make_problem(18, 2, 4, 4, 2, [4, 4], special="one_rank")
    world = World(problem.params(EpLayout.FLAT, max_recv_tokens_per_rank=5), 2)
    slots = world.update(problem)
    got = world.dispatch(slots, problem)
    assert int(got[0].recv_total_counter) == 5
    error = to_error(world.alarms()[0], 5, 1.0)
    assert "8 rows arrived on rank 0" in str(error) and ">= 8" in str(error)
    rows = [torch.ones_like(out.expert_tensors) for out in got]
    assert all(y.isfinite().all() for y in world.combine(slots, problem, rows))


def test_another_k_on_one_rank() -> None:
    problem = make_problem(19, 2, 4, 4, 3, [3, 3], special="distinct")
    world = World(problem.params(), 2)
    short = [problem.topk_ids[0], problem.topk_ids[1][:, :2]]
    slots = [engine.take_slot() for engine in world.engines]
    for engine, slot, ids, weights in zip(world.engines, slots, short, problem.topk_weights):
        weights = weights[:, : ids.shape[1]]
        engine.bind_update(slot, ids, weights)(0, ids, weights)
    for send in (True, False):
        for engine, slot, ids, x in zip(world.engines, slots, short, problem.xs):
            engine.bind_dispatch(slot, x, ids.shape[1], engine.outputs[0], send, not send)(0, x)
    assert [trouble_in(word) for word in world.alarms()] == [Trouble.MISMATCH] * 2


def test_flat_rows_wait_until_what_came_back_was_read() -> None:
    """Dispatch of step 3 comes into the memory that combine of step 1 used, which a slower rank may still read."""
    problem = make_problem(3, 2, 4, 6, 2, [3, 3], torch.float32, "distinct")
    world = World(problem.params(EpLayout.FLAT), 2)
    first, second = world.update(problem), world.update(problem)
    rows = [out.expert_tensors.clone() for out in world.dispatch(first, problem, 0)]
    world.dispatch(second, problem, 1)
    outs = [torch.empty_like(x) for x in problem.xs]

    def combine(rank: int, send: bool) -> None:
        engine = world.engines[rank]
        launch = engine.bind_combine(first[rank], rows[rank], outs[rank], problem.topk, send, not send)
        launch(0, rows[rank], outs[rank])

    combine(0, send=True)
    combine(1, send=True)
    combine(0, send=False)
    engine, slot, x = world.engines[0], world.update(problem)[0], problem.xs[0]
    launch = engine.bind_dispatch(slot, x, problem.topk, engine.outputs[0], True, False)
    launch(0, x)
    assert trouble_in(int(engine.alarm[0])) is Trouble.TIMEOUT_DISPATCH, "rank 1 has not read what came back"
    combine(1, send=False)
    engine.clear_alarm()
    engine.control[CONTROL.budget_ns] = 10**9
    engine.control[CONTROL.launches] -= engine.dispatch_grid.programs  # step 3 again
    launch(0, x)
    assert world.alarms() == [0, 0]
