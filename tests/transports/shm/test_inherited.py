"""Handles that are made for one step each, as a layer makes them: later ones go the short way from their first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefleet import (
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    Fleet,
    FleetParams,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpError,
    create_fleet,
)
from moefleet.fleet.halves import HalvesHandle
from moefleet.knobs import HandleAlgoKnob
from moefleet.substrate.control import SETS
from moefleet.transports.shm.fleet import ShmFleet
from moefleet.transports.shm.whole import MOST_SHAPES
from tests.native.needs import needs_the_helper
from tests.transports.shm.ranks import EXPERTS, HIDDEN, TOPK, fleet_of
from tests.transports.shm.ways import ALONE, LAYOUTS, T, X, routing

pytestmark = needs_the_helper


def once(fleet: Fleet, number: int, *knobs: HandleAlgoKnob) -> torch.Tensor:
    ids, weights, _ = routing(number)
    with fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights), *knobs]) as handle:
        out = handle.dispatch(DispatchInputParams([X]))
        return handle.combine(CombineInputParams([out.expert_tensors])).x


@LAYOUTS
def test_later_handles_of_a_shape_take_it_from_their_first_step(
    layout: EpLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet_of(ALONE, layout) as fleet:
        for number in range(3):
            once(fleet, number)

        def refuse(*_: Any) -> None:
            raise AssertionError("the long way")

        for call in ("dispatch", "combine"):
            monkeypatch.setattr(HalvesHandle, call, refuse)
        results = [once(fleet, number) for number in range(6)]
        for number, y in enumerate(results):
            torch.testing.assert_close(y, routing(number, layout)[2])


def test_what_a_handle_leaves_is_used_by_one_at_a_time() -> None:
    with fleet_of(ALONE) as fleet:
        for number in range(4):
            once(fleet, number)
        for turn in range(4):
            open_steps = []
            for number in (turn, turn + 1):
                ids, weights, y = routing(number)
                handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
                open_steps.append((handle, y, handle.dispatch(DispatchInputParams([X])).expert_tensors))
            for handle, y, rows in open_steps:
                torch.testing.assert_close(handle.combine(CombineInputParams([rows])).x, y)
                handle.destroy()


def test_what_a_knob_asked_of_one_handle_is_not_asked_of_the_next() -> None:
    _, _, y = routing(2)
    rows = HandleAlgoKnobNumReceivedTokens(T)
    with fleet_of(ALONE) as fleet:
        for _ in range(3):
            torch.testing.assert_close(once(fleet, 2), y)
            torch.testing.assert_close(once(fleet, 2, rows), y)
            with pytest.raises(MoEEpError, match=rf"got {T - 1}"):
                once(fleet, 2, HandleAlgoKnobNumReceivedTokens(T - 1))


def test_a_handle_that_ends_in_the_middle_of_a_step_leaves_nothing() -> None:
    with fleet_of(ALONE) as fleet:
        for number in range(5):
            once(fleet, number)
        ids, weights, _ = routing(1)
        for _ in range(3):
            handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
            handle.dispatch(DispatchInputParams([X]))
            handle.destroy()
            for number in range(2):
                torch.testing.assert_close(once(fleet, number), routing(number)[2])


def test_what_is_left_is_bounded() -> None:
    params = FleetParams(EXPERTS, 100, HIDDEN, 4, max_topk=TOPK)
    with create_fleet(ALONE, params, backend="shm") as fleet:
        for count in [*range(100), *range(100)]:
            ids = torch.zeros(count, TOPK, dtype=torch.int64)
            weights = HandleAlgoKnobTopKWeights(torch.ones(count, TOPK))
            handles = [fleet.create_handle(HandleParams(ids), [weights]) for _ in range(4)]
            for handle in handles:
                handle.destroy()
        assert isinstance(fleet, ShmFleet) and fleet.whole is not None
        assert len(fleet.whole.left) <= MOST_SHAPES
        assert all(len(each) <= SETS for each in fleet.whole.left.values())
