"""The contracts: what is optional raises with the way out, so other people's subclasses never break."""

from __future__ import annotations

from typing import Any

import pytest

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    Fleet,
    FleetParams,
    FleetSpec,
    Handle,
    MoEEpFaultToleranceUnsupportedError,
    MoEEpNotBuiltError,
)
from moefleet.fleet import Meeting


class BareHandle(Handle):
    """Only what is abstract."""

    destroyed = 0
    given_up: BaseException | None = None

    def dispatch(self, params: Any) -> Any: ...

    def combine(self, params: Any) -> Any: ...

    def update(self, params: Any, algo_knobs: Any = ()) -> None: ...

    def destroy(self) -> None:
        self.destroyed += 1


class BareFleet(Fleet):
    """Only what is abstract."""

    destroyed = 0

    def create_handle(self, params: Any, algo_knobs: Any = ()) -> Handle:
        return BareHandle()

    def destroy(self) -> None:
        self.destroyed += 1


@pytest.fixture
def fleet() -> BareFleet:
    bootstrap = BootstrapConfig(1, 0)
    return BareFleet(FleetSpec(bootstrap, FleetParams(5, 4, 8), (), None, Meeting(bootstrap)))


def test_a_fleet_needs_no_more_than_two_methods(fleet: BareFleet) -> None:
    assert fleet.params.num_experts == 5
    assert fleet.placement.num_local(0) == 5
    assert BareFleet.probe().available
    assert fleet.stats() == {}
    assert (fleet.supports_fault_tolerance, fleet.active_mask_epoch) == (False, 0)
    assert "rank 0 of 1, 5 experts (5 here), M=4, H=8" in fleet.describe()


def test_a_with_block_destroys(fleet: BareFleet) -> None:
    with pytest.raises(LookupError), fleet, fleet.create_handle(None) as handle:  # type: ignore[arg-type]
        raise LookupError
    assert fleet.destroyed == 1
    assert isinstance(handle, BareHandle) and handle.destroyed == 1


class TellingHandle(BareHandle):
    """One that can say why."""

    def give_up(self, error: BaseException) -> None:
        assert not self.destroyed
        self.given_up = error


def test_an_exception_that_leaves_a_with_block_is_what_the_step_is_given_up_for() -> None:
    error = LookupError("no such expert")
    with pytest.raises(LookupError), TellingHandle() as handle:
        raise error
    assert (handle.given_up, handle.destroyed) == (error, 1)
    with TellingHandle() as handle:
        pass
    assert (handle.given_up, handle.destroyed) == (None, 1)


@pytest.mark.parametrize(
    "call, arguments",
    [
        ("query_fault", ()),
        ("query_active_mask", ()),
        ("set_active_mask", ([1],)),
        ("reconcile_active_mask", ()),
        ("clear_faults", ()),
        ("update_topology", (BootstrapConfig(1, 0),)),
    ],
)
def test_fault_calls_say_that_there_is_no_fault_tolerance(fleet: BareFleet, call: str, arguments: tuple) -> None:
    with pytest.raises(
        MoEEpFaultToleranceUnsupportedError, match=f"{call}: this BareFleet Fleet has no fault"
    ) as caught:
        getattr(fleet, call)(*arguments)
    assert isinstance(caught.value, NotImplementedError)
    assert "FleetAlgoKnobFaultTolerance" in str(caught.value)


def test_halves_say_what_to_call_instead() -> None:
    handle = BareHandle()
    for call, arguments, instead in (
        ("dispatch_send_only", (DispatchInputParams([]),), "dispatch()"),
        ("dispatch_recv_only", (), "dispatch()"),
        ("combine_send_only", (CombineInputParams([]),), "combine()"),
        ("combine_recv_only", (), "combine()"),
    ):
        with pytest.raises(MoEEpNotBuiltError, match="BareHandle has no separate halves: use") as caught:
            getattr(handle, call)(*arguments)
        assert instead in str(caught.value)
    handle.complete()
    assert handle.combine_buffer() is None
