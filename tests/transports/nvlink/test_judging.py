"""Fault tolerance in the kernels, all ranks in one process under Triton's interpreter.

A flag that is not there never comes, so a budget is over at once. ``decide`` plays the host's part of a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from moefleet import EpLayout, reference
from moefleet.tensors import DispatchOutput
from tests.strategies import Problem, make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip(
        "kernels are compiled where there is a GPU: see benchmarks/gpu/check_faults.py", allow_module_level=True
    )

from triton.runtime.interpreter import interpreter_builder

from moefleet.transports.nvlink.alarm import Trouble, trouble_in
from moefleet.transports.nvlink.geometry import BOARD, CONTROL
from moefleet.transports.nvlink.kernels import judging, waiting
from tests.transports.nvlink.simulate import GRIDS, World, shared_words

LAYOUTS = pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())


def scale(x: torch.Tensor, index: int) -> torch.Tensor:
    """An expert that is not the identity."""
    return x * (index + 1)


def three_ranks(layout: EpLayout, number: int = 1, **faults: bool) -> tuple[World, Problem]:
    problem = make_problem(number, 3, 6, 4, 2, [2, 1, 2], special="distinct")
    return World(problem.params(layout), 3, tolerant=True, **faults), problem


def two_ranks(layout: EpLayout, number: int = 2) -> tuple[World, Problem]:
    problem = make_problem(number, 2, 4, 4, 2, [2, 3], special="distinct")
    return World(problem.params(layout), 2, tolerant=True), problem


def computed(got: Sequence[DispatchOutput]) -> list[torch.Tensor]:
    return [reference.compute(out, scale, fill=float("nan")) for out in got]


def step(world: World, problem: Problem, skip: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """A step of all ranks but those in ``skip``."""
    slots = world.update(problem)
    homes = world.combine(slots, problem, computed(world.dispatch(slots, problem, skip=skip)), skip)
    for engine, slot in zip(world.engines, slots):
        engine.return_slot(slot)
    assert world.alarms() == [0] * problem.world_size
    return homes


def half(world: World, slots: list[torch.Tensor], problem: Problem, rank: int, send: bool) -> DispatchOutput:
    """One half of one rank's dispatch."""
    engine, x = world.engines[rank], problem.xs[rank]
    engine.bind_dispatch(slots[rank], x, problem.topk, engine.outputs[0], send, not send)(0, x)
    return world.views[rank].of(0, x.dtype, problem.topk)


def received(world: World, problem: Problem, mask: Sequence[int]) -> list[DispatchOutput]:
    """What the ranks in ``mask`` receive."""
    return reference.dispatch(problem.xs, *problem.routing, world.params, mask=mask, fill=float("nan"))


def check(
    homes: Sequence[torch.Tensor], world: World, problem: Problem, mask: Sequence[int], renormalize: bool = False
) -> None:
    """Outputs of the ranks in ``mask`` are those without the others."""
    want = received(world, problem, mask)
    rows = [None if out is None else reference.compute(out, scale, fill=float("nan")) for out in want]
    expected = reference.combine(rows, *problem.routing, world.params, mask=mask, renormalize=renormalize)
    for y, e in zip(homes, expected):
        assert e is None or torch.allclose(y, e, rtol=0, atol=1e-4)


def accused(world: World, rank: int) -> list[int]:
    """Whom a rank accuses."""
    words = world.engines[rank].board[BOARD.accused : BOARD.accused + len(world.engines)]
    return [peer for peer, word in enumerate(words) if word]


def behind(world: World) -> list[int]:
    """Ranks that learned that others know more."""
    return [rank for rank, engine in enumerate(world.engines) if engine.board[BOARD.behind]]


def decide(world: World, mask: Sequence[int], ranks: Iterable[int], number: int, resume: int) -> None:
    """What the host does on ``ranks`` after decision ``number``."""
    for rank in ranks:
        world.engines[rank].count_only(mask)
        world.engines[rank].resume(resume, number)


@pytest.fixture
def before_program(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Sets a function that is called with each program's number before it runs."""

    def install(call: Callable[[int], None]) -> None:
        original = interpreter_builder.set_grid_idx

        def set_grid_idx(x: int, y: int, z: int) -> None:
            call(x)
            original(x, y, z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)

    return install


def test_nothing_wrong() -> None:
    world, problem = three_ranks(EpLayout.FLAT)
    for _ in range(2):
        check(step(world, problem), world, problem, [1, 1, 1])
    assert [accused(world, rank) for rank in range(3)] == [[], [], []] and behind(world) == []


@LAYOUTS
def test_masked_ranks_are_neither_waited_for_nor_sent_to(layout: EpLayout) -> None:
    world, problem = three_ranks(layout)
    check(step(world, problem), world, problem, [1, 1, 1])
    decide(world, [1, 1, 0], (0, 1), 1, 2)
    before = world.memory[2].clone()
    for _ in range(2):
        check(step(world, problem, skip=(2,)), world, problem, [1, 1, 0])
    assert torch.equal(world.memory[2], before)
    assert [accused(world, rank) for rank in (0, 1)] == [[], []] and behind(world) == []


@LAYOUTS
def test_a_rank_that_does_not_come_is_left_out_at_once_and_from_then_on(layout: EpLayout) -> None:
    world, problem = three_ranks(layout)
    for _ in range(2):
        check(step(world, problem, skip=(2,)), world, problem, [1, 1, 0])
        assert [accused(world, rank) for rank in (0, 1)] == [[2], [2]]
    # Another accuses as this rank does: nothing new.
    assert behind(world) == []


def test_a_rank_that_does_not_come_to_combine() -> None:
    world, problem = three_ranks(EpLayout.FLAT)
    slots = world.update(problem)
    got = world.dispatch(slots, problem)
    homes = world.combine(slots, problem, computed(got), skip=(2,))
    assert all(y.isfinite().all() for y in homes[:2])
    check(homes, world, problem, [1, 1, 0])
    assert [accused(world, rank) for rank in (0, 1)] == [[2], [2]]


def test_what_a_dead_rank_had_committed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flag is seen after its death was: it came before."""
    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    slots = world.update(problem)
    for rank in (0, 1):
        half(world, slots, problem, rank, send=True)
    world.engines[0].board[BOARD.dead + 1] = 1
    flag = shared_words(world, 0, world.engines[0].geometry.shared.head_flag, 2, torch.int64, 1)
    value, flag[1] = int(flag[1]), 0
    original = judging._look

    def look(*args: Any) -> Any:
        seen = original(*args)
        flag[1] = value
        return seen

    monkeypatch.setattr(judging, "_look", look)
    out = half(world, slots, problem, 0, send=False)
    assert torch.equal(out.expert_counts, received(world, problem, [1, 1])[0].expert_counts)
    assert accused(world, 0) == []
    half(world, slots, problem, 1, send=False)
    check(step(world, problem, skip=(1,)), world, problem, [1, 0])
    assert accused(world, 0) == [1]


@LAYOUTS
def test_one_verdict_for_programs_that_see_the_flag_late(layout: EpLayout, before_program: Any) -> None:
    """The flag of rank 1 comes after program 0 gave up on it: the other programs leave it out as well."""
    world, problem = two_ranks(layout)
    slots, late = world.update(problem), []
    for rank in (1, 0):
        half(world, slots, problem, rank, send=True)
    flag = shared_words(world, 0, world.engines[0].geometry.shared.head_flag, 2, torch.int64, 1)
    value, flag[1] = int(flag[1]), 0

    def come_late(program: int) -> None:
        if program == 1:
            flag[1] = value
            late.append(program)

    before_program(come_late)
    out = half(world, slots, problem, 0, send=False)
    assert late and int(flag[1]) == value
    want = received(world, problem, [1, 0])[0]
    live = ~want.expert_tensors.isnan().any(-1)
    assert torch.equal(out.expert_tensors[live], want.expert_tensors[live])
    for name in ("expert_counts", "recv_total_counter", "recv_topk_idx", "recv_topk_weights"):
        a, b = getattr(out, name), getattr(want, name)
        assert (a is None and b is None) or torch.equal(a, b), name
    assert accused(world, 0) == [1]
    # Absent in dispatch is absent in combine, though rank 1 takes part in it; and rank 1 is told.
    rows = computed([out, half(world, slots, problem, 1, send=False)])
    homes = world.combine(slots, problem, rows)
    check(homes, world, problem, [1, 0])
    assert homes[1].isfinite().all()
    assert behind(world) == [1] and accused(world, 1) == []


@LAYOUTS
def test_a_row_that_never_comes(layout: EpLayout) -> None:
    """The header is there, one row is not: the rank is accused, and gets none of its rows back."""
    problem = make_problem(3, 2, 2, 4, 1, [1, 3])
    ids = (torch.tensor([[1]]), torch.tensor([[0], [0], [1]]))
    problem = Problem(2, 2, 4, 1, problem.xs, ids, problem.topk_weights)
    world = World(problem.params(layout), 2, tolerant=True)
    slots = world.update(problem)
    most = world.params.max_tokens_per_rank
    for rank in (0, 1):
        half(world, slots, problem, rank, send=True)
    shared_words(world, 0, world.engines[0].geometry.shared.row_flag, 2 * most, torch.int64, 1)[most + 1] = 0
    out, other = (half(world, slots, problem, rank, send=False) for rank in (0, 1))
    if layout is not EpLayout.EXPERT_MAJOR:
        assert sorted(out.recv_topk_idx.reshape(-1).tolist()).count(0) == 1
    homes = world.combine(slots, problem, [torch.ones_like(each.expert_tensors) for each in (out, other)])
    assert all(y.isfinite().all() for y in homes)
    assert torch.equal(homes[1][:2], torch.zeros(2, 4))  # not even for the row that had come
    assert accused(world, 0) == [1] and behind(world) == [1]


def test_a_rank_in_a_later_round_ends_the_wait_and_is_not_accused() -> None:
    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    world.engines[1].announce(1)
    check(step(world, problem, skip=(1,)), world, problem, [1, 0])
    assert accused(world, 0) == [] and behind(world) == [0]
    world.engines[1].announce(0)  # its round came to nothing
    check(step(world, problem, skip=(1,)), world, problem, [1, 0])
    assert accused(world, 0) == [1]


def test_absent_in_dispatch_is_absent_in_combine() -> None:
    """Also if the rank was not accused, comes after all, and takes part in combine."""
    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    slots = world.update(problem)
    world.engines[1].announce(1)
    out = world.dispatch(slots, problem, skip=(1,))[0]
    world.engines[1].announce(0)
    half(world, slots, problem, 1, send=True)
    rows = computed([out, half(world, slots, problem, 1, send=False)])
    check(world.combine(slots, problem, rows), world, problem, [1, 0])
    assert behind(world) == [0, 1] and accused(world, 0) == accused(world, 1) == []


def test_a_rank_that_waits_for_somebody_else_gets_three_budgets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    original = judging._look

    def look(p: Any, *rest: Any) -> Any:
        looks.append(1)
        return original(p, *rest)

    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    monkeypatch.setattr(judging, "_look", look)
    counts = []
    for waits in (0, 1):
        world, problem = two_ranks(EpLayout.RANK_MAJOR)
        shared_words(world, 0, world.engines[0].geometry.shared.waiting, 2, torch.int64, 0)[1] = waits
        step(world, problem, skip=(1,))
        assert accused(world, 0) == [1]
        counts.append(len(looks))
        looks.clear()
    assert counts == [2, 5]


def test_a_rank_says_that_it_waits(before_program: Any) -> None:
    """Rank 0 waits for rank 2: rank 1 could have seen that, and no longer sees it when the wait is over."""
    world, problem = three_ranks(EpLayout.RANK_MAJOR)
    said = shared_words(world, 1, world.engines[1].geometry.shared.waiting, 3, torch.int64, 0)
    seen: list[int] = []
    release, flags = waiting.release, []

    def watching(flag: Any, value: Any) -> None:
        release(flag, value)
        seen.append(int(said[0]))

    waiting.release, flags = watching, flags
    try:
        step(world, problem, skip=(2,))
    finally:
        waiting.release = release
    assert 1 in seen and int(said[0]) == 0


def test_stale_flags_after_a_resume() -> None:
    """A rank that the others went on without runs ahead in the old round; its flags pass for nothing in a new one."""
    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    step(world, problem)
    decide(world, [1, 0], (0,), 1, 2)
    for _ in range(2):
        check(step(world, problem, skip=(1,)), world, problem, [1, 0])
    world.engines[0].announce(1)
    for _ in range(6):  # alone, steps 2 to 7 of round 0
        step(world, problem, skip=(0,))
    assert accused(world, 1) == [] and behind(world) == [1]
    decide(world, [1, 1], (0,), 2, 6)
    # Rank 1's flags and headers of step 6 are there, but of round 0.
    check(step(world, problem, skip=(1,)), world, problem, [1, 0])
    assert accused(world, 0) == [1]
    decide(world, [1, 1], (0, 1), 3, 9)
    healthy, _ = two_ranks(EpLayout.RANK_MAJOR)
    want = step(healthy, problem)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(world, problem), want))
    assert [accused(world, rank) for rank in (0, 1)] == [[], []] and behind(world) == []


def test_a_header_of_a_later_round_says_that_we_are_behind() -> None:
    world, problem = two_ranks(EpLayout.EXPERT_MAJOR)
    step(world, problem)
    decide(world, [1, 1], (1,), 1, 2)
    slots = world.update(problem)
    got = world.dispatch(slots, problem)
    assert torch.equal(got[0].expert_counts, received(world, problem, [1, 0])[0].expert_counts)
    homes = world.combine(slots, problem, computed(got))
    assert all(y.isfinite().all() for y in homes)
    check([homes[0]], world, problem, [1, 0])
    assert behind(world) == [0] and accused(world, 0) == []
    assert accused(world, 1) == [0]  # a header of an older round is none


def test_a_header_with_accusations_that_we_lack() -> None:
    world, problem = three_ranks(EpLayout.RANK_MAJOR)
    judged = world.engines[1]
    judged.control[CONTROL.left + 2] = 1  # accused in the dispatch of an earlier step
    homes = step(world, problem)
    assert behind(world) == [0, 2] or behind(world) == [0]
    assert accused(world, 0) == [] and homes[0].isfinite().all()


def test_a_rank_that_ended_is_accused() -> None:
    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    step(world, problem)
    world.engines[1].depart(0)
    check(step(world, problem, skip=(1,)), world, problem, [1, 0])
    assert accused(world, 0) == [1]


def test_a_step_that_a_rank_gave_up_accuses_nobody() -> None:
    world, problem = three_ranks(EpLayout.FLAT)
    decide(world, [1, 1, 0], (0, 1), 1, 1)
    slots = world.update(problem)
    world.engines[1].fail(slots[1], 0, fresh=True, wait=False)
    got = world.dispatch(slots, problem, skip=(1, 2))
    homes = world.combine(slots, problem, computed(got), skip=(1, 2))
    check([homes[0]], world, problem, [1, 0, 0])
    assert trouble_in(world.alarms()[0]) is Trouble.PEER_FAILED
    world.engines[0].clear_alarm()
    assert accused(world, 0) == [] and behind(world) == []
    check(step(world, problem, skip=(2,)), world, problem, [1, 1, 0])


def test_giving_up_waits_for_nobody_that_is_gone() -> None:
    world, problem = three_ranks(EpLayout.RANK_MAJOR)
    decide(world, [1, 1, 0], (0,), 1, 1)
    slots = world.update(problem)
    world.engines[0].fail(slots[0], 0, fresh=True)
    assert accused(world, 0) == [1] and world.alarms()[0] == 0


@LAYOUTS
def test_renormalize(layout: EpLayout) -> None:
    problem = make_problem(5, 2, 4, 4, 3, [5, 3], special="random")
    ids = problem.topk_ids[0].clone()
    ids[0] = torch.tensor([2, 3, -1])  # only experts of rank 1
    ids[1] = torch.tensor([0, 0, 2])  # twice the same, and one of rank 1
    problem = Problem(2, 4, 4, 3, problem.xs, (ids, problem.topk_ids[1]), problem.topk_weights)
    world = World(problem.params(layout), 2, tolerant=True, renormalize=True)
    check(step(world, problem), world, problem, [1, 1], renormalize=True)
    homes = step(world, problem, skip=(1,))
    check(homes, world, problem, [1, 0], renormalize=True)
    assert torch.equal(homes[0][0], torch.zeros(4))


def test_two_open_steps() -> None:
    """A rank dies after it dispatched the first of two steps: both complete."""
    world, problem = two_ranks(EpLayout.RANK_MAJOR)
    first, second = world.update(problem), world.update(problem)
    got = computed(world.dispatch(first, problem, 0))
    world.dispatch(second, problem, 1, skip=(1,))
    assert accused(world, 0) == [1]
    check(world.combine(first, problem, got, skip=(1,)), world, problem, [1, 0])
    rows = computed(world.dispatch(second, problem, 1, skip=(0, 1)))
    check(world.combine(second, problem, rows, skip=(1,)), world, problem, [1, 0])


def test_programs_of_one_grid_are_enough() -> None:
    assert GRIDS[0].programs < 1 << 16, "programs that wait are counted in 16 bits"
