"""Waits that fail without fault tolerance: calls that cross, ranks that come too late, and how all go on afterwards.

First in one process under Triton's interpreter, where a flag that is not there never comes; then in processes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout, MoEEpError, MoEEpPeerError, MoEEpTimeoutError, create_fleet, reference
from moefleet.tensors import DispatchOutput
from tests.conformance.comparing import check_step as check_step_of_all
from tests.conformance.context import RankContext, step
from tests.conformance.test_mistakes import one_does_not_come, opposite
from tests.faults.engine import die, run
from tests.strategies import LAYOUTS, Problem, make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU: the conformance suite does this", allow_module_level=True)

from moefleet.transports.nvlink.alarm import Trouble, to_error, trouble_in
from moefleet.transports.nvlink.geometry import BOARD
from tests.transports.nvlink.simulate import World, shared_words

pytestmark = pytest.mark.timeout(110)
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())


def scale(x: torch.Tensor, index: int) -> torch.Tensor:
    return x * (index + 1)


def ranks(layout: EpLayout, count: int, **faults: bool) -> tuple[World, Problem]:
    problem = make_problem(5, count, 6, 4, 2, [3, 2, 4][:count], special="distinct")
    return World(problem.params(layout), count, **faults), problem


def check_step(world: World, problem: Problem, which: int = 0) -> None:
    """A step of all ranks is right, and reports nothing."""
    slots = world.update(problem)
    rows = [reference.compute(out, scale) for out in world.dispatch(slots, problem, which)]
    homes = world.combine(slots, problem, rows)
    assert world.alarms() == [0] * problem.world_size
    got = reference.dispatch(problem.xs, *problem.routing, world.params)
    want = reference.combine([reference.compute(out, scale) for out in got], *problem.routing, world.params)
    for y, e in zip(homes, want, strict=True):
        torch.testing.assert_close(y, e, rtol=0, atol=1e-4)


def send(world: World, slot: torch.Tensor, problem: Problem, rank: int, which: int = 0) -> None:
    half(world, slot, problem, rank, which, True)


def half(world: World, slot: torch.Tensor, problem: Problem, rank: int, which: int, send: bool) -> DispatchOutput:
    """One half of one rank's dispatch."""
    engine, x = world.engines[rank], problem.xs[rank]
    engine.bind_dispatch(slot, x, problem.topk, engine.outputs[which], send, not send)(0, x)
    return world.views[rank].of(which, x.dtype, problem.topk)


def combine_half(world: World, slot: torch.Tensor, problem: Problem, rank: int, send: bool) -> None:
    x, out = problem.xs[rank], world.views[rank].of(0, problem.xs[rank].dtype, problem.topk)
    rows, y = out.expert_tensors.nan_to_num(), torch.empty_like(x)
    world.engines[rank].bind_combine(slot, rows, y, problem.topk, send, not send)(0, rows, y)


def phases_told(world: World, rank: int) -> list[int]:
    """The phase in which each peer says that it waits for ``rank``."""
    at = world.engines[rank].geometry.shared.awaits
    return shared_words(world, rank, at, len(world.engines), torch.int64, 0).tolist()


def clear(world: World) -> None:
    for engine in world.engines:
        engine.clear_alarm()


def crossed(layout: EpLayout, **faults: bool) -> tuple[World, Problem, list[torch.Tensor], torch.Tensor]:
    """Rank 0 waits in dispatch of step 2, rank 1 in combine of step 1, and they find that out one after the other."""
    world, problem = ranks(layout, 2, **faults)
    slots, second = world.update(problem), world.update(problem)[0]
    world.dispatch(slots, problem)
    send(world, second, problem, 0, 1)
    combine_half(world, slots[1], problem, 1, send=True)
    shared_words(world, 0, world.engines[0].geometry.shared.awaits, 2, torch.int64, 0)[1] = 3
    half(world, second, problem, 0, 1, send=False)
    assert phases_told(world, 1)[0] == -4, "what rank 1 reads, also when rank 0 has gone on"
    combine_half(world, slots[1], problem, 1, send=False)
    return world, problem, slots, second


@EACH_LAYOUT
def test_calls_that_cross_are_named_on_both_sides(layout: EpLayout) -> None:
    world, problem, slots, second = crossed(layout)
    errors = [to_error(word, 9, 1.0) for word in world.alarms()]
    calls = ["dispatch of step 2", "combine of step 1"]
    for rank, (error, mine, theirs) in enumerate(zip(errors, calls, reversed(calls), strict=True)):
        assert isinstance(error, MoEEpPeerError) and error.rank == 1 - rank
        assert f"this rank waits in {mine} for rank {1 - rank}" in str(error)
        assert f"rank {1 - rank} itself waits in {theirs} for this rank" in error.reason
    clear(world)
    world.engines[0].fail(second, 0, fresh=False)  # step 2, which the error of its dispatch has ended
    world.engines[1].fail(slots[1], 0, fresh=False)  # step 1
    for rank in (0, 1):  # rank 0 combines step 1, rank 1 dispatches step 2: neither has all of it
        world.engines[rank].fail((slots[0], slots[1])[rank], 0, fresh=rank == 1)
    clear(world)
    check_step(world, problem)


@EACH_LAYOUT
def test_calls_in_one_order_do_not_cross(layout: EpLayout) -> None:
    """A rank that is late in the same phase, or in one whose part it was sent already."""
    for said in (2, 4):  # dispatch of step 1, which rank 0 sent; dispatch of step 2, in which rank 0 waits as well
        world, problem = ranks(layout, 2)
        slots, second = world.update(problem), world.update(problem)[0]
        world.dispatch(slots, problem)
        send(world, second, problem, 0, 1)
        shared_words(world, 0, world.engines[0].geometry.shared.awaits, 2, torch.int64, 0)[1] = said
        half(world, second, problem, 0, 1, send=False)
        assert trouble_in(world.alarms()[0]) is Trouble.TIMEOUT_DISPATCH
        assert phases_told(world, 1)[0] == 0, "the wait is over"


@EACH_LAYOUT
def test_calls_that_cross_accuse_nobody(layout: EpLayout) -> None:
    """With fault tolerance the ranks leave each other out of that phase, and the step is flagged."""
    world, _, _, _ = crossed(layout, tolerant=True)
    assert [trouble_in(word) for word in world.alarms()] == [Trouble.CROSSED] * 2
    for engine in world.engines:
        assert not engine.board[BOARD.accused : BOARD.accused + 2].any() and engine.board[BOARD.behind]


@EACH_LAYOUT
def test_a_rank_whose_wait_failed_sends_nothing_until_its_host_knows(layout: EpLayout) -> None:
    """Rank 2 comes two steps late: it reads what was sent to it before, is told of every failed step, and none of its
    memory was written over meanwhile."""
    world, problem = ranks(layout, 3)
    slots = world.update(problem)
    world.dispatch(slots, problem, skip=(2,))
    assert [trouble_in(word) for word in world.alarms()[:2]] == [Trouble.TIMEOUT_DISPATCH] * 2
    places = world.engines[2].geometry.shared
    before = [
        shared_words(world, 2, places.rows, places.set_bytes - places.rows, torch.uint8, s).clone() for s in (0, 1)
    ]
    rows = [world.views[rank].of(0, problem.xs[0].dtype, 2).expert_tensors.nan_to_num() for rank in range(3)]
    world.combine(slots, problem, rows, skip=(2,))
    for which in (1, 0):  # steps 2 and 3, launched before anybody looked
        world.dispatch(slots, problem, which, skip=(2,))
        world.combine(slots, problem, rows, skip=(2,))
    after = [shared_words(world, 2, places.rows, places.set_bytes - places.rows, torch.uint8, s) for s in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    late = world.update(problem)[2]
    for _ in range(3):
        half(world, late, problem, 2, 0, send=True)
        half(world, late, problem, 2, 0, send=False)
        combine_half(world, late, problem, 2, send=True)
        combine_half(world, late, problem, 2, send=False)
        assert trouble_in(world.alarms()[2]) is Trouble.PEER_FAILED
        world.engines[2].clear_alarm()
    clear(world)
    for which in (1, 0, 1):
        check_step(world, problem, which)


@EACH_LAYOUT
def test_a_set_is_sent_into_again_once_the_peers_are_through(layout: EpLayout) -> None:
    """Rank 1 still reads step 1, which rank 0 gave up long ago."""
    world, problem = ranks(layout, 2)
    slots = world.update(problem)
    for rank in (0, 1):
        send(world, slots[rank], problem, rank)
    engine = world.engines[0]
    engine.fail(slots[0], 0, fresh=False)  # step 1
    engine.fail(slots[0], 0, fresh=True)  # step 2
    places = world.engines[1].geometry.shared
    rows = shared_words(world, 1, places.rows, places.set_bytes - places.rows, torch.uint8, 1)
    rows.fill_(7)
    send(world, slots[0], problem, 0)  # step 3
    word = world.alarms()[0]
    assert trouble_in(word) is Trouble.TIMEOUT_DISPATCH and "rank 1 did not come to dispatch of step 3" in str(
        to_error(word, 9, 1.0)
    )
    assert (rows == 7).all()
    engine.fail(slots[0], 0, fresh=False)  # step 3, whose dispatch raised
    half(world, slots[1], problem, 1, 0, send=False)
    world.engines[1].fail(slots[1], 0, fresh=False)  # what rank 1 makes of steps 1 to 3
    for _ in range(2):
        world.engines[1].fail(slots[1], 0, fresh=True)
    clear(world)
    for which in (1, 0, 1):
        check_step(world, problem, which)


def test_peers_hear_of_rows_that_do_not_fit() -> None:
    """Rank 0's combine was launched before its host saw that more rows came than it has room for."""
    problem = make_problem(5, 2, 6, 4, 2, [3, 3], special="one_rank")
    world = World(problem.params(EpLayout.FLAT, max_recv_tokens_per_rank=4), 2)
    slots = world.update(problem)
    rows = [reference.compute(out, scale) for out in world.dispatch(slots, problem)]
    world.combine(slots, problem, rows)
    assert [trouble_in(word) for word in world.alarms()] == [Trouble.OVERFLOW, Trouble.PEER_FAILED]


@EACH_LAYOUT
def test_a_dispatch_that_lacks_a_row_serves_nobody(layout: EpLayout) -> None:
    """Also where the error was raised by a call that has nothing to do with the step: rank 1 is told, whose rows
    came whole, as rank 0 cannot tell what it unpacked."""
    world, problem = ranks(layout, 3)
    slots = world.update(problem)
    for rank in range(3):
        send(world, slots[rank], problem, rank)
    places = world.engines[0].geometry.shared
    row_flags = shared_words(world, 0, places.row_flag, 3 * world.params.max_tokens_per_rank, torch.int64, 1)
    first = 2 * world.params.max_tokens_per_rank
    assert row_flags[first] == 1, "rank 2 has a row for rank 0"
    row_flags[first] = 0
    for rank in range(3):
        half(world, slots[rank], problem, rank, 0, send=False)
    assert [trouble_in(word) for word in world.alarms()[:1]] == [Trouble.TIMEOUT_DISPATCH]
    assert world.alarms()[1:] == [0, 0]
    world.engines[0].clear_alarm()
    for now in (True, False):
        for rank in range(3):
            combine_half(world, slots[rank], problem, rank, send=now)
    for word in world.alarms()[1:]:
        assert trouble_in(word) is Trouble.PEER_FAILED and (word >> 8) & 0xFFFF == 0


def test_more_ranks_than_fault_tolerance_has_room_for() -> None:
    problem = make_problem(1, 33, 33, 2, 1, [1] * 33)
    world = World(problem.params(EpLayout.RANK_MAJOR), 33)
    assert [engine.mask.tolist() for engine in world.engines[:1]] == [[1] * 33]


# In processes, through the whole Fleet.

PROBLEM = make_problem(7, 2, 4, 4, 2, [2, 3], torch.float32, "distinct")


def in_another_order(bootstrap: BootstrapConfig) -> Any:
    """The conformance suite's ranks whose calls cross, then its rank that comes after the others gave up."""
    from tests.transports.nvlink.pretend import CONFIG, pretend

    os.environ["MOEFLEET_CHECK"] = "1"
    pretend()
    ctx, params = (
        RankContext(replace(bootstrap, timeout_s=90.0), "nvlink", config=CONFIG),
        PROBLEM.params(EpLayout.FLAT),
    )
    crossed, late = opposite(ctx, params, PROBLEM), one_does_not_come(ctx, params, PROBLEM, 4.0)
    ctx.meet("all is said")
    for fleet in ctx.fleets:
        fleet.destroy()
    return crossed, late


def test_ranks_go_on_after_calls_that_crossed_and_after_a_late_one() -> None:
    crossed, late = zip(*run(in_another_order, world=2, timeout_s=100), strict=True)
    for rank, (errors, _) in enumerate(crossed):
        call = ("dispatch of step 2", "combine of step 1")[rank]
        assert f"this rank waits in {call} for rank {1 - rank}" in str(errors[0]), errors
    (waited, _), (behind, _) = late
    assert isinstance(waited, MoEEpTimeoutError) and waited.ranks == (1,)
    assert isinstance(behind, MoEEpPeerError) and "rank 1 did not come to dispatch of step 1" in behind.reason
    for outcomes in crossed, late:
        check_step_of_all(PROBLEM, PROBLEM.params(EpLayout.FLAT), [after for _, after in outcomes], True)


def one_ends(bootstrap: BootstrapConfig) -> Any:
    """The error of a rank whose peer is killed while it is waited for."""
    from tests.transports.nvlink.pretend import CONFIG, pretend

    os.environ["MOEFLEET_CHECK"] = "1"
    pretend()
    mine = [part[bootstrap.rank] for part in (PROBLEM.xs, PROBLEM.topk_ids, PROBLEM.topk_weights)]
    fleet = create_fleet(replace(bootstrap, timeout_s=90.0), PROBLEM.params(EpLayout.RANK_MAJOR), (), CONFIG)
    step(fleet, *mine)
    if bootstrap.rank == 1:
        die()
    with pytest.raises(MoEEpError) as caught, fleet:
        step(fleet, *mine)
    return [caught.value]


def test_a_process_that_ends_is_not_waited_for() -> None:
    (error,), _ = run(one_ends, world=2, dead=[1], timeout_s=80)
    assert isinstance(error, MoEEpPeerError) and error.rank == 1
    assert "the process of rank 1 ended before it came to step 2" in str(error)
