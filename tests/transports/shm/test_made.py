"""Memory for what experts make in EXPERT_MAJOR: used again in the next step, unless somebody may still read it."""

from __future__ import annotations

from uuid import uuid4

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    Fleet,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    Handle,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    ShmConfig,
    create_fleet,
)
from tests.conformance.pool import shared_pool
from tests.native.needs import needs_the_helper

pytestmark = needs_the_helper

T, HIDDEN, EXPERTS = 4, 16, 4


def fleet_of(bootstrap: BootstrapConfig, *, tolerant: bool = False) -> Fleet:
    knobs = [FleetAlgoKnobFaultTolerance()] if tolerant else []
    params = FleetParams(EXPERTS, T, HIDDEN, max_topk=EXPERTS, dtype_bytes=4)
    return create_fleet(bootstrap, params, knobs, backend=ShmConfig(place_bytes=0))


def handle_of(fleet: Fleet) -> Handle:
    """Every token goes to every expert, and their rows have one weight: where they are the token, so is their sum."""
    ids = torch.arange(EXPERTS).repeat(T, 1)
    return fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(torch.full((T, EXPERTS), 1 / EXPERTS))])


def dispatched(handle: Handle, number: float) -> torch.Tensor:
    """The experts' rows, where they can stay, of tokens that are all this number."""
    tokens = torch.full((T, HIDDEN), float(number))
    return made_of(handle, handle.dispatch(DispatchInputParams([tokens])).expert_tensors)


def made_of(handle: Handle, rows: torch.Tensor) -> torch.Tensor:
    """These rows, where they can stay."""
    made = handle.combine_buffer()
    assert made is not None
    return made.copy_(rows)


def given(handle: Handle, made: torch.Tensor) -> float:
    """The number that all of the result is."""
    summed = handle.combine(CombineInputParams([made])).x
    assert (summed == summed[0, 0]).all()
    return float(summed[0, 0])


def steps_in_turn(bootstrap: BootstrapConfig, tolerant: bool) -> int:
    with fleet_of(bootstrap, tolerant=tolerant) as fleet, handle_of(fleet) as handle:
        places = set()
        for number in range(6):
            made = dispatched(handle, number)
            places.add(made.data_ptr())
            assert given(handle, made) == number
        return len(places)


@pytest.mark.parametrize("tolerant", [False, True])
def test_steps_in_turn_use_one_memory(tolerant: bool) -> None:
    """With fault tolerance two: a rank that was left behind finds out by its steps that its memory is overwritten."""
    for rank in shared_pool().run(steps_in_turn, tolerant, world_size=2):
        assert rank.error is None, rank.error
        assert rank.value == 1 + tolerant


def steps_that_overlap(bootstrap: BootstrapConfig) -> list[float]:
    got = []
    with fleet_of(bootstrap) as fleet, handle_of(fleet) as one, handle_of(fleet) as other:
        for number in range(6):
            first = dispatched(one, number)
            second = dispatched(other, -number)
            assert first.data_ptr() != second.data_ptr()
            got += [given(one, first), given(other, second)]
    return got


def test_open_steps_have_their_own() -> None:
    for rank in shared_pool().run(steps_that_overlap, world_size=2):
        assert rank.error is None, rank.error
        assert rank.value == [sign * number for number in range(6) for sign in (1, -1)]


def received_in_any_order(bootstrap: BootstrapConfig) -> list[float]:
    """Rank 0 receives the newer of two steps first, every other time; rank 1 places its rows, and reads where it made
    them."""
    got = []
    with fleet_of(bootstrap) as fleet, handle_of(fleet) as one, handle_of(fleet) as other:
        for number in range(1, 9):
            if bootstrap.rank == 1:
                mades = [dispatched(one, number), dispatched(other, -number)]
            else:
                for handle, tokens in (one, number), (other, -number):
                    handle.dispatch_send_only(DispatchInputParams([torch.full((T, HIDDEN), float(tokens))]))
                order = [one, other] if number % 2 else [other, one]
                filled = [made_of(handle, handle.dispatch_recv_only().expert_tensors) for handle in order]
                mades = filled if number % 2 else filled[::-1]
            assert mades[0].data_ptr() != mades[1].data_ptr()
            got += [given(one, mades[0]), given(other, mades[1])]
    return got


def test_steps_received_in_any_order_have_their_own() -> None:
    for rank in shared_pool().run(received_in_any_order, world_size=2):
        assert rank.error is None, rank.error
        assert rank.value == [sign * number for number in range(1, 9) for sign in (1, -1)]


def slow_to_read(bootstrap: BootstrapConfig, name: str) -> list[float]:
    """Rank 1 sums a step only after rank 0, which is done with it, has written what experts made in the next."""
    got = []
    with fleet_of(bootstrap) as fleet, handle_of(fleet) as one, handle_of(fleet) as other:
        for number in range(1, 7):
            made = dispatched(one, number)
            if bootstrap.rank == 0:
                got.append(given(one, made))
                made = dispatched(other, -number)
            else:
                one.combine_send_only(CombineInputParams([made]))
                made = dispatched(other, -number)
            barrier(bootstrap, f"{name}/{number}")
            if bootstrap.rank == 1:
                got.append(float(one.combine_recv_only().x[0, 0]))
            got.append(given(other, made))
    return got


def barrier(bootstrap: BootstrapConfig, name: str) -> None:
    store = bootstrap.tcp_store
    assert store is not None
    store.set(f"{name}/{bootstrap.rank}", "came")
    store.wait([f"{name}/{rank}" for rank in range(bootstrap.world_size)])


def test_what_a_peer_still_reads_stays() -> None:
    for rank in shared_pool().run(slow_to_read, uuid4().hex, world_size=2):
        assert rank.error is None, rank.error
        assert rank.value == [sign * number for number in range(1, 7) for sign in (1, -1)]
