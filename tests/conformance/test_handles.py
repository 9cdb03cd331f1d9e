"""A handle's life: routing read once, updates, halves, results that belong to the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    FleetParams,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobSplitOperation,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpConfigError,
    MoEEpError,
)
from tests.conformance.comparing import check_results, check_step, dispatched
from tests.conformance.context import NAN, RankContext, compute, made, poison, received, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


@pytest.fixture
def problem(ranks: Ranks) -> Problem:
    return ranks.problem([5, 0, 4], topk=3, hidden=6)


@pytest.fixture
def other(ranks: Ranks) -> Problem:
    """Of the same shape."""
    return ranks.problem([5, 0, 4], seed=9, topk=3, hidden=6)


def once(handle: Any, fleet: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    out = handle.dispatch(sent(x))
    first = received(out)
    return first, handle.combine(made(compute(fleet, out))).x


# When routing is read.


def updated(ctx: RankContext, params: FleetParams, problem: Problem, other: Problem) -> list[Any]:
    fleet = ctx.fleet(params)
    (x, ids, weights), (x2, ids2, weights2) = ctx.mine(problem), ctx.mine(other)
    handle = routed(fleet, ids, weights)
    got = [once(handle, fleet, x)]
    for _ in range(2):
        handle.update(HandleParams(ids2), [HandleAlgoKnobTopKWeights(weights2)])
        got.append(once(handle, fleet, x2))
        got.append(once(handle, fleet, x2))  # and without an update in between
        handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
        got.append(once(handle, fleet, x))
    return got


def test_update_brings_new_routing(ranks: Ranks, layout: EpLayout, problem: Problem, other: Problem) -> None:
    params = ranks.params(problem, layout)
    by_rank = ranks(updated, params, problem, other)
    for index, which in enumerate([problem, other, other, problem, other, other, problem]):
        check_step(which, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


def weights_read_again(ctx: RankContext, params: FleetParams, problem: Problem, other: Problem) -> list[Any]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle = routed(fleet, ids, weights)
    weights.copy_(ctx.mine(other)[2])
    got = [once(handle, fleet, x)]
    handle.update(HandleParams(ids))
    return [*got, once(handle, fleet, x)]


def test_update_without_weights_reads_the_given_tensor_again(
    ranks: Ranks, layout: EpLayout, problem: Problem, other: Problem
) -> None:
    params = ranks.params(problem, layout)
    by_rank = ranks(weights_read_again, params, problem, other)
    mixed = replace(problem, topk_weights=other.topk_weights)
    for index, which in enumerate([problem, mixed]):
        check_results(which, params, [got[index][1] for got in by_rank])


def changed_later(ctx: RankContext, params: FleetParams, problem: Problem, other: Problem) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle = routed(fleet, ids, weights)
    _, ids2, weights2 = ctx.mine(other)
    ids.copy_(ids2), weights.copy_(weights2)
    out = handle.dispatch(sent(x))
    first = received(out)
    ids.fill_(10**6), weights.fill_(NAN), x.fill_(NAN)
    return first, handle.combine(made(compute(fleet, out))).x


def test_later_changes_of_the_callers_tensors_change_nothing(
    ranks: Ranks, layout: EpLayout, problem: Problem, other: Problem
) -> None:
    params = ranks.params(problem, layout)
    check_step(problem, params, ranks(changed_later, params, problem, other), ranks.transport.has("canonical_order"))


def other_shapes(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """All ranks make the same mistakes, so none of them waits for another."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle = routed(fleet, ids, weights)
    errors = []
    for wrong_ids in (ids[:-1], torch.cat([ids, ids]), ids[:, :-1], torch.cat([ids, ids], 1)[:, : ids.shape[1] + 1]):
        with pytest.raises(MoEEpConfigError) as caught:
            handle.update(HandleParams(wrong_ids), [HandleAlgoKnobTopKWeights(torch.ones_like(wrong_ids).float())])
        errors.append(str(caught.value))
    for wrong_rows in (x[:-1], torch.cat([x, x])):
        with pytest.raises(MoEEpConfigError) as caught:
            handle.dispatch(sent(wrong_rows))
        errors.append(str(caught.value))
    return errors, once(handle, fleet, x)


def test_shapes_are_fixed_for_a_handles_life(ranks: Ranks, layout: EpLayout) -> None:
    """A handle updated to fewer tokens kept the old weights (case 24)."""
    problem = ranks.problem([4, 3], topk=2)
    params = ranks.params(problem, layout, max_tokens_per_rank=8, max_topk=3)
    by_rank = ranks(other_shapes, params, problem, world=2)
    for rank, (errors, _) in enumerate(by_rank):
        shape = f"[{problem.tokens[rank]}, 2]"
        assert all("topk_ids" in text and shape in text for text in errors[:4]), errors
        assert all("x[0]" in text and f"[{problem.tokens[rank]}, " in text for text in errors[4:]), errors
    check_step(problem, params, [step for _, step in by_rank], ranks.transport.has("canonical_order"))


# Halves.


def halves(ctx: RankContext, params: FleetParams, problem: Problem) -> list[Any]:
    """Whole, in halves, and split, with the caller's own work between, over both buffer sets."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    work = ctx.put(torch.eye(8))
    got = []
    for _ in range(3):
        got.append(step(fleet, x, ids, weights))
        with routed(fleet, ids, weights) as handle:
            handle.dispatch_send_only(sent(x))
            work = work @ work
            out = handle.dispatch_recv_only()
            first, rows = received(out), compute(fleet, out)
            handle.combine_send_only(made(rows))
            work = work @ work
            got.append((first, handle.combine_recv_only().x))
        with routed(fleet, ids, weights, HandleAlgoKnobSplitOperation()) as handle:
            handle.complete()  # nothing is pending
            out = handle.dispatch(sent(x))
            work = work @ work
            handle.complete()
            handle.complete()
            first, rows = received(out), compute(fleet, out)
            y = handle.combine(made(rows)).x
            work = work @ work
            handle.complete()
            handle.complete()
            got.append((first, y))
        with routed(fleet, ids, weights, HandleAlgoKnobSplitOperation()) as handle:
            out = handle.dispatch(sent(x))
            handle.complete()
            first, rows = received(out), compute(fleet, out)
            place = torch.full_like(x, NAN)
            assert handle.combine(made(rows, out=place)).x is place
            handle.complete()
            got.append((first, place))
    return got


def test_halves_and_split_operations_give_the_same_bits(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    ranks.require("halves")
    params = ranks.params(problem, layout)
    by_rank = ranks(halves, params, problem)
    for first, *others in by_rank:
        assert len(others) == 11
        for other in others:
            assert torch.equal(first[1], other[1])
    for index in range(12):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


def tidy(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle = routed(fleet, ids, weights)
    handle.complete()
    out = handle.dispatch(sent(x))
    first = received(out)
    handle.complete()  # nothing is pending without the knob
    y = handle.combine(made(compute(fleet, out))).x
    handle.complete()
    for _ in range(3):
        handle.destroy()
        handle.complete()
    return first, y


def test_complete_and_destroy_may_be_called_at_any_time(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    params = ranks.params(problem, layout)
    check_step(problem, params, ranks(tidy, params, problem), ranks.transport.has("canonical_order"))


# Where rows and results lie.


def straight(ctx: RankContext, params: FleetParams, problem: Problem) -> list[Any]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    got = []
    for _ in range(3):
        got.append(step(fleet, x, ids, weights)[1])
        with routed(fleet, ids, weights) as handle:
            out = handle.dispatch(sent(x))
            rows, place = compute(fleet, out), handle.combine_buffer()
            if place is None:
                place = torch.empty_like(out.expert_tensors)
            assert place.shape == out.expert_tensors.shape and place.dtype == out.expert_tensors.dtype
            place.copy_(rows)  # NaN past the counts, too
            got.append(handle.combine(made(place)).x)
    return got


def test_rows_written_straight_into_the_combine_buffer(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    ranks.require("combine_buffer")
    params = ranks.params(problem, layout)
    by_rank = ranks(straight, params, problem)
    for first, *others in by_rank:
        for other in others:
            assert torch.equal(first, other)
    check_results(problem, params, [got[0] for got in by_rank])


def in_place(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """The expert step writes over what it received and hands that back."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x))
        first = received(out)
        out.expert_tensors.copy_(compute(fleet, out))
        poison(out)
        return first, handle.combine(made(out.expert_tensors)).x


def test_rows_computed_in_place(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    params = ranks.params(problem, layout)
    check_step(problem, params, ranks(in_place, params, problem), ranks.transport.has("canonical_order"))


def results(ctx: RankContext, params: FleetParams, problem: Problem) -> list[torch.Tensor]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    kept = [step(fleet, x, ids, weights)[1]]
    for index in range(5):  # whatever later steps and callers write, earlier results stay
        y = step(fleet, x * (index + 2), ids, weights)[1]
        kept.append(y / (index + 2) if ctx.rank else y.clone() / (index + 2))
        y.fill_(NAN)
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x))
        place = torch.full_like(x, NAN)
        assert handle.combine(made(compute(fleet, out), out=place, out_is_stable=True)).x is place
        kept.append(place)
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x))
        place = torch.full((len(x), 2 * x.shape[1]), NAN, dtype=x.dtype, device=x.device)[:, ::2]
        handle.combine(made(compute(fleet, out), out=place))
        kept.append(place.clone())
    fleet.destroy()
    return kept


def test_results_belong_to_the_caller(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    params = ranks.params(problem, layout)
    by_rank = ranks(results, params, problem)
    for index in range(8):
        check_results(problem, params, [kept[index] for kept in by_rank])


def other_type_back(ctx: RankContext, params: FleetParams, problem: Problem) -> torch.Tensor:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x.bfloat16()))
        return handle.combine(made(compute(fleet, out).half())).x


def test_the_result_has_the_type_of_the_rows_on_the_way_back(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([4, 3], topk=2, dtype=torch.float16)
    x = tuple((each * 8).round() / 8 for each in problem.xs)  # exact in both types
    problem = Problem(2, problem.num_experts, problem.hidden, 2, x, problem.topk_ids, problem.topk_weights)
    params = ranks.params(problem, layout)
    check_results(problem, params, ranks(other_type_back, params, problem, world=2))


# What the caller knows, and the order of calls.


def announced(ctx: RankContext, params: FleetParams, problem: Problem, rows: list[int]) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    knob = HandleAlgoKnobNumReceivedTokens(rows[ctx.rank])
    with routed(fleet, ids, weights, knob) as handle:
        return once(handle, fleet, x)


def test_rows_to_come_may_be_announced(ranks: Ranks, problem: Problem) -> None:
    params = ranks.params(problem, EpLayout.FLAT)
    rows = [int(out.recv_total_counter) for out in dispatched(problem, params)]
    check_step(problem, params, ranks(announced, params, problem, rows), ranks.transport.has("canonical_order"))


def out_of_order(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Wrong calls at every point of a step: each raises, loses nothing, and the step goes on."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle = routed(fleet, ids, weights)
    rows = torch.zeros(1)
    told: list[tuple[str, str]] = []

    def refuse(*names: str) -> None:
        calls = {
            "dispatch": lambda: handle.dispatch(sent(x)),
            "dispatch_recv_only": handle.dispatch_recv_only,
            "combine": lambda: handle.combine(made(rows)),
            "combine_recv_only": handle.combine_recv_only,
            "update": lambda: handle.update(HandleParams(ids)),
        }
        for name in names:
            with pytest.raises(MoEEpError) as caught:
                calls[name]()
            told.append((name, str(caught.value)))

    refuse("dispatch_recv_only", "combine", "combine_recv_only")
    handle.dispatch_send_only(sent(x))
    refuse("dispatch", "combine", "combine_recv_only", "update")
    out = handle.dispatch_recv_only()
    first = received(out)
    refuse("dispatch", "dispatch_recv_only", "combine_recv_only", "update")
    handle.combine_send_only(made(compute(fleet, out)))
    refuse("dispatch", "dispatch_recv_only", "combine", "update")
    y = handle.combine_recv_only().x
    refuse("dispatch_recv_only", "combine", "combine_recv_only")
    handle.destroy()
    refuse("dispatch", "combine", "update")
    return told, (first, y)


def test_calls_out_of_order_are_refused(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    ranks.require("halves")
    params = ranks.params(problem, layout)
    by_rank = ranks(out_of_order, params, problem)
    for told, _ in by_rank:
        for name, text in told:
            assert name in text and "next call is" in text, text
        assert "destroyed" in told[-1][1]
    check_step(problem, params, [step for _, step in by_rank], ranks.transport.has("canonical_order"))
