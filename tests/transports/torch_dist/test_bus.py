"""What a rank's end of the rounds keeps of steps that fail."""

from __future__ import annotations

import pytest
import torch

from moefleet import MoEEpPeerError
from moefleet.knobs import RowFormat
from moefleet.substrate.control import Operation
from moefleet.transports.torch_dist.bus import Bus
from moefleet.transports.torch_dist.parcel import Parcel
from moefleet.transports.torch_dist.status import Kind, Status
from moefleet.transports.torch_dist.wire import Wire
from tests.transports.torch_dist.fake_group import FakeWorld

CPU = torch.device("cpu")
FORMAT = RowFormat(hidden=4, quantised=False, there_bytes=4, back_bytes=4, scale_bytes=0)


def buses(world_size: int) -> list[Bus]:
    world = FakeWorld(world_size)
    wires = [Wire.on(world.group(rank), CPU, None) for rank in range(world_size)]
    return [Bus(wire, rank, world_size, 5, FORMAT, 8, 2) for rank, wire in enumerate(wires)]


def parcel(world_size: int) -> Parcel:
    """A row for every rank."""
    meta = torch.zeros(world_size, 16, dtype=torch.uint8)
    return Parcel(torch.ones(world_size, 4), torch.arange(world_size).numpy(), (1,) * world_size, meta)


def ready(step: int, operation: Operation) -> Status:
    return Status(Kind.READY, step, operation, topk=2)


def failed(step: int) -> Status:
    return Status(Kind.FAILED, step, Operation.DISPATCH, origin=1, reason="no")


def test_what_is_queued_behind_a_failure_of_its_step_is_not_sent() -> None:
    """Rank 0 has sent for step 1 and queued what it has for step 2, which rank 1 has given up before."""
    first, second = buses(2)
    first.post(ready(1, Operation.DISPATCH), parcel(2))
    first.post(ready(2, Operation.DISPATCH), parcel(2))
    second.post(failed(2))
    with pytest.raises(MoEEpPeerError, match="rank 1 failed in step 2, dispatch: no"):
        first.take(2, Operation.DISPATCH)
    first.abandon(2)
    assert first.rounds == 1 and not first.owes()
    second.post(ready(1, Operation.DISPATCH), parcel(2))  # the other open step goes on
    assert first.take(1, Operation.DISPATCH) is not None
    assert len(second.take(1, Operation.DISPATCH).parts) == len(first.take(1, Operation.DISPATCH).parts) == 2
    assert not first.owes() and not second.owes()


def test_what_comes_for_a_step_that_has_failed_is_not_kept() -> None:
    """Rank 0 learns with the same round that it sends in, rank 2 sends later, and nobody waits for their rows."""
    first, second, third = all_of_them = buses(3)
    first.post(ready(1, Operation.DISPATCH), parcel(3))
    second.post(failed(1))
    third.post(ready(1, Operation.DISPATCH), parcel(3))
    for bus in all_of_them:
        bus.advance()
        bus.abandon(1)
    assert not any(bus.owes() for bus in all_of_them)
    assert not any(bus._letters or bus._pending for bus in all_of_them)


def test_a_phase_that_becomes_complete_in_the_round_in_which_its_step_fails() -> None:
    """Rank 0 sends for step 2 first, so that its rows of step 1 come with what rank 1 says of the next phase."""
    first, second, third = all_of_them = buses(3)
    first.post(ready(2, Operation.DISPATCH), parcel(3))
    second.post(ready(1, Operation.DISPATCH), parcel(3))
    third.post(ready(1, Operation.DISPATCH), parcel(3))
    first.post(ready(1, Operation.DISPATCH), parcel(3))
    second.post(Status(Kind.FAILED, 1, Operation.COMBINE, origin=1, reason="no"))
    third.post(ready(2, Operation.DISPATCH), parcel(3))
    for bus in all_of_them:
        bus.advance()
        with pytest.raises(MoEEpPeerError, match="rank 1 failed in step 1, combine: no"):
            bus.take(1, Operation.DISPATCH)
        bus.abandon(1)
    assert [bus.error for bus in all_of_them] == [None] * 3
    assert not any(bus.owes() or bus._complete for bus in all_of_them)
