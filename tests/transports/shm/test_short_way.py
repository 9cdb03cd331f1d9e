"""A handle that is used again takes a short way: with the bits of the long one, and not where anything is unusual."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
    Handle,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobSplitOperation,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpError,
    MoEEpPeerError,
    ShmConfig,
    create_fleet,
)
from moefleet.fleet.halves import HalvesHandle
from moefleet.substrate.control import Operation
from moefleet.transports.shm.fleet import ShmFleet
from tests.conformance.pool import shared_pool
from tests.native.needs import needs_the_helper
from tests.transports.shm.ranks import EXPERTS, HIDDEN, MOST, TOPK, fleet_of
from tests.transports.shm.ways import ALONE, LAYOUTS, T, X, routing, step, warm

pytestmark = needs_the_helper

W = 3


@LAYOUTS
def test_it_is_taken(layout: EpLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(ALONE, layout) as fleet:
        handle = warm(fleet)

        def refuse(*_: Any) -> None:
            raise AssertionError("the long way")

        for call in ("update", "dispatch", "combine"):
            monkeypatch.setattr(HalvesHandle, call, refuse)
        results = [step(handle, number) for number in range(5)]
        handle.update(HandleParams(routing(5)[0]), [HandleAlgoKnobTopKWeights(routing(5)[1])])
        rows, given = handle.dispatch(DispatchInputParams([X])).expert_tensors, torch.empty(T, HIDDEN)
        results.append(handle.combine(CombineInputParams([rows], out=given)).x)
        assert results[5] is given
        for number, y in enumerate(results):  # afterwards: each is a tensor of its own
            torch.testing.assert_close(y, routing(number, layout)[2])
        assert fleet.stats()["steps"] == 10 and fleet.stats()["tokens"] == 10 * T
        assert isinstance(fleet, ShmFleet)
        assert fleet.group.waiter.describe(0) == "RUNNING, step 10, combine"
        assert fleet.group.waiter.committed(0, Operation.CLOSED, 10)


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "columns": lambda: X.T.contiguous().T,
    "wide": lambda: torch.stack([X, -X], 1)[:, 0],
    "gradient": lambda: X.clone().requires_grad_(),
    "negated": lambda: torch._neg_view(-X),
    "parameter": lambda: torch.nn.Parameter(X),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensors(make: Callable[[], torch.Tensor]) -> None:
    with fleet_of(ALONE) as fleet:
        handle = warm(fleet)
        for number in range(3):
            torch.testing.assert_close(step(handle, number, make()), routing(number)[2])
            out = handle.dispatch(DispatchInputParams([X])).expert_tensors
            rows = torch.stack([out, -out], 2)[:, :, 0] if make is UNUSUAL["wide"] else torch._neg_view(-out)
            torch.testing.assert_close(handle.combine(CombineInputParams([rows])).x, routing(number)[2])
            torch.testing.assert_close(step(handle, number), routing(number)[2])


def test_a_given_result_is_not_written_by_later_steps() -> None:
    with fleet_of(ALONE) as fleet:
        handle, wide = warm(fleet), torch.full((T, 2 * HIDDEN), torch.nan)
        for given in wide[:, HIDDEN:], torch._neg_view(X.clone()), X.clone():
            rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
            assert handle.combine(CombineInputParams([rows], out=given)).x is given
            torch.testing.assert_close(given, routing(3)[2])
        assert wide[:, :HIDDEN].isnan().all()
        before = given.clone()
        for number in range(4):
            torch.testing.assert_close(step(handle, number), routing(number)[2])
        assert torch.equal(given, before)


@LAYOUTS
def test_handles_with_another_k_in_turn(layout: EpLayout) -> None:
    with fleet_of(ALONE, layout) as fleet:
        handle, (ids, weights, _) = warm(fleet), routing(1)
        narrow = fleet.create_handle(HandleParams(ids[:2, :1]), [HandleAlgoKnobTopKWeights(weights[:2, :1])])
        for number in range(6):
            for user, topk_ids, x in (narrow, ids[:2, :1], X[:2]), (handle, ids, X):
                user.update(HandleParams(topk_ids), [HandleAlgoKnobTopKWeights(weights[: len(x), : topk_ids.shape[1]])])
                out = user.dispatch(DispatchInputParams([x]))
                if out.recv_topk_idx is not None:
                    shown = out.recv_topk_idx.view(-1, out.recv_topk_idx.shape[-1])
                    here = topk_ids[(topk_ids >= 0).any(1)]
                    assert shown[: len(here)].tolist() == here.tolist()
                user.combine(CombineInputParams([out.expert_tensors]))
            torch.testing.assert_close(step(handle, number), routing(number, layout)[2])


def test_halves_between() -> None:
    with fleet_of(ALONE) as fleet:
        handle = warm(fleet)
        for number in range(5):
            ids, weights, expected = routing(number)
            handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
            rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
            handle.combine_send_only(CombineInputParams([rows]))
            torch.testing.assert_close(handle.combine_recv_only().x, expected)
            torch.testing.assert_close(step(handle, number), expected)
        handle.update(HandleParams(ids), [HandleAlgoKnobSplitOperation()])
        out = handle.dispatch(DispatchInputParams([X]))
        handle.complete()
        y = handle.combine(CombineInputParams([out.expert_tensors])).x
        handle.complete()
        torch.testing.assert_close(y, expected)


def _twice(handle: Handle) -> None:
    handle.dispatch(DispatchInputParams([X]))
    handle.dispatch(DispatchInputParams([X]))


def _update_between(handle: Handle) -> None:
    handle.dispatch(DispatchInputParams([X]))
    handle.update(HandleParams(routing(1)[0]))


def _combine_sent(handle: Handle) -> None:
    rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
    handle.combine_send_only(CombineInputParams([rows]))
    handle.combine(CombineInputParams([rows]))


def _destroyed(handle: Handle) -> None:
    handle.destroy()
    handle.update(HandleParams(routing(1)[0]))


def _rows(*rows: torch.Tensor) -> Callable[[Handle], None]:
    def combine(handle: Handle) -> None:
        handle.dispatch(DispatchInputParams([X]))
        handle.combine(CombineInputParams(rows))

    return combine


def _into(out: torch.Tensor) -> Callable[[Handle], None]:
    def combine(handle: Handle) -> None:
        rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
        handle.combine(CombineInputParams([rows], out=out))

    return combine


def _announced(handle: Handle) -> None:
    handle.update(HandleParams(routing(1)[0]), [HandleAlgoKnobNumReceivedTokens(99)])
    handle.dispatch(DispatchInputParams([X]))


WRONG: dict[str, Callable[[Handle], object]] = {
    "dispatch twice": _twice,
    "update of an open step": _update_between,
    "combine twice": _combine_sent,
    "combine of no step": lambda handle: handle.combine(CombineInputParams([X])),
    "a destroyed handle": _destroyed,
    "no tokens": lambda handle: handle.dispatch(DispatchInputParams([])),
    "scales": lambda handle: handle.dispatch(DispatchInputParams([X, X])),
    "fewer tokens": lambda handle: handle.dispatch(DispatchInputParams([X[1:]])),
    "another type": lambda handle: handle.dispatch(DispatchInputParams([X.bfloat16()])),
    "another type of rows": _rows(X.bfloat16()),
    "rows of another shape": _rows(X),
    "two tensors of rows": _rows(X, X),
    "a result of another shape": _into(X[1:].clone()),
    "a result of another type": _into(X.double()),
    "an id": lambda handle: handle.update(HandleParams(torch.full((T, TOPK), EXPERTS))),
    "rows that were announced": _announced,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_mistakes_are_those_of_a_new_handle(wrong: Callable[[Handle], object]) -> None:
    said = []
    for steps in (0, 4):
        with fleet_of(ALONE) as fleet:
            handle = warm(fleet, steps)
            with pytest.raises(MoEEpError) as caught:
                wrong(handle)
            said.append((type(caught.value), str(caught.value), fleet.stats()["failed_steps"]))
            handle.destroy()
            torch.testing.assert_close(step(warm(fleet, 0), 3), routing(3)[2])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "x", [None, (), torch.nested.nested_tensor([torch.zeros(1, 2)])], ids=["None", "none", "nested"]
)
def test_what_is_no_rows_at_all_fails_the_step(x: Any) -> None:
    """With whatever error: the step is over, and the handle can go on."""
    for steps in (0, 4):
        with fleet_of(ALONE) as fleet:
            handle = warm(fleet, steps)
            handle.update(HandleParams(routing(1)[0]), [HandleAlgoKnobTopKWeights(routing(1)[1])])
            handle.dispatch(DispatchInputParams([X]))
            with pytest.raises((TypeError, RuntimeError, MoEEpError)):
                handle.combine(CombineInputParams([x] if isinstance(x, torch.Tensor) else x))
            assert fleet.stats()["failed_steps"] == 1
            torch.testing.assert_close(step(handle, 2), routing(2)[2])


def test_an_interrupted_combine_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what the helper is told of another kind of rows, and what is remembered of them."""
    with fleet_of(ALONE) as fleet:
        first, other = warm(fleet), warm(fleet)
        assert fleet.whole is not None
        call = fleet.whole.combine_call

        def interrupted(*args: Any) -> int:
            raise KeyboardInterrupt

        for _ in range(2):  # in each parity
            out = first.dispatch(DispatchInputParams([X]))
            wide = torch.cat([out.expert_tensors, out.expert_tensors], -1)[..., :HIDDEN]
            monkeypatch.setattr(fleet.whole, "combine_call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                first.combine(CombineInputParams([wide]))
            monkeypatch.setattr(fleet.whole, "combine_call", call)
        for number in (1, 2, 3, 4):
            torch.testing.assert_close(step(other, number), routing(number)[2])
        for number in (1, 2, 3, 4):
            torch.testing.assert_close(step(first, number), routing(number)[2])


def test_a_given_result_is_let_go() -> None:
    with fleet_of(ALONE) as fleet:
        handle, given = warm(fleet), torch.empty(T, HIDDEN)
        out = handle.dispatch(DispatchInputParams([X]))
        handle.combine(CombineInputParams([out.expert_tensors], out=given))
        told = weakref.ref(given)
        del given
        assert told() is None


def test_a_given_result_is_let_go_by_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(ALONE) as fleet:
        handle, given = warm(fleet), torch.empty(T, HIDDEN)
        assert fleet.whole is not None

        def interrupted(*args: Any) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(fleet.whole, "combine_call", interrupted)
        rows = handle.dispatch(DispatchInputParams([X])).expert_tensors
        with pytest.raises(KeyboardInterrupt):
            handle.combine(CombineInputParams([rows], out=given))
        handle.destroy()
        gone = weakref.ref(given)
        del given
        assert gone() is None


def test_a_destroyed_fleet() -> None:
    fleet = fleet_of(ALONE)
    handle = warm(fleet)
    fleet.destroy()
    for call in (
        lambda: handle.update(HandleParams(routing(1)[0])),
        lambda: handle.dispatch(DispatchInputParams([X])),
    ):
        with pytest.raises(MoEEpError, match="destroyed"):
            call()


def test_scales_are_never_left_out() -> None:
    params = FleetParams(EXPERTS, MOST, HIDDEN, 4, max_topk=TOPK, scale_bytes_per_token=8)
    with create_fleet(ALONE, params, backend="shm") as fleet:
        handle, scales = warm(fleet, 0), torch.ones(T, 2)
        for _ in range(4):
            rows = handle.dispatch(DispatchInputParams([X, scales])).expert_tensors
            handle.combine(CombineInputParams([rows]))
        with pytest.raises(MoEEpError, match="1 tensors"):
            handle.dispatch(DispatchInputParams([X]))


def test_three_open_steps() -> None:
    with fleet_of(ALONE) as fleet:
        handles = [warm(fleet) for _ in range(3)]
        rows = [handle.dispatch(DispatchInputParams([X])).expert_tensors for handle in handles[:2]]
        with pytest.raises(MoEEpError, match="at most 2 steps"):
            handles[2].dispatch(DispatchInputParams([X]))
        for handle, given in zip(handles, rows, strict=False):
            torch.testing.assert_close(handle.combine(CombineInputParams([given])).x, routing(3)[2])


def test_memory_of_a_failed_step_is_waited_for() -> None:
    with fleet_of(ALONE) as fleet:
        assert isinstance(fleet, ShmFleet)
        handle, steps = warm(fleet), fleet.steps
        steps.fail_next(ValueError("a mistake"))
        step(handle, 1)
        assert steps.begin_now() == 0 and steps.last == 6
        step(handle, 1)
        assert steps.last == 7


def _shared(bootstrap: BootstrapConfig, layout: EpLayout, spin_us: int | None, **knobs: Any) -> Fleet:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    params = FleetParams(EXPERTS, MOST, HIDDEN, 4, algorithm, layout, max_topk=TOPK)
    return create_fleet(bootstrap, params, backend=ShmConfig(place_bytes=0, spin_us=spin_us), **knobs)


def together(bootstrap: BootstrapConfig, layout: EpLayout, spin_us: int | None, again: bool) -> list[torch.Tensor]:
    """Steps of one handle, or of one for each; rank 1 gives up some."""
    found, x = [], X * (1 + bootstrap.rank)
    with _shared(bootstrap, layout, spin_us) as fleet:
        handle = warm(fleet, 0)
        for number in range(12):
            if not again:
                handle.destroy()
                handle = warm(fleet, 0)
            try:
                if number % 5 == 4 and bootstrap.rank == 1:
                    step(handle, number, X[1:])
                found.append(step(handle, number, x))
                rows = handle.dispatch(DispatchInputParams([x])).expert_tensors
                given = torch.empty_like(x) if number % 3 == 0 else None
                found.append(handle.combine(CombineInputParams([rows], out=given)).x)
            except MoEEpError as error:
                assert isinstance(error, MoEEpPeerError) == (bootstrap.rank != 1)
                found.append(torch.zeros(0))
    return found


@LAYOUTS
def test_ranks_together(layout: EpLayout) -> None:
    """Also where each wait is left to Python at once, and where peers give steps up."""
    ways = [
        shared_pool().run(together, layout, spin_us, again, world_size=W)
        for spin_us, again in ((None, False), (None, True), (0, True))
    ]
    for rank in range(W):
        for way in ways:
            assert way[rank].error is None, way[rank].error
        for one, *others in zip(*(way[rank].value for way in ways), strict=True):
            assert all(torch.equal(one, other) for other in others)


def left_behind(bootstrap: BootstrapConfig, layout: EpLayout) -> list[torch.Tensor]:
    """Rank 2 leaves after four steps; the others go on, before and after they agree on that."""
    tolerant = FleetAlgoKnobFaultTolerance(timeout_ms=20_000)
    with _shared(bootstrap, layout, None, algo_knobs=[tolerant]) as fleet:
        handle = warm(fleet)
        if bootstrap.rank == 2:
            return []
        found = [step(handle, 5) for _ in range(2)]
        assert fleet.query_fault()
        assert fleet.reconcile_active_mask().tolist() == [1, 1, 0]
        return found + [step(handle, 5) for _ in range(3)]


@LAYOUTS
def test_a_rank_that_left(layout: EpLayout) -> None:
    outcomes = shared_pool().run(left_behind, layout, world_size=W)
    ids, weights, _ = routing(5)
    live = (ids >= 0) & (ids < 2 * EXPERTS // W)
    times = (weights * live).sum(1, keepdim=True)
    if layout is not EpLayout.EXPERT_MAJOR:
        times = sum(((ids // (EXPERTS // W) == rank) & live).any(1, keepdim=True) for rank in range(2)) * torch.ones(1)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        for y in outcome.value:
            torch.testing.assert_close(y, X * times)
