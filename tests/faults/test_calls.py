"""The fault calls where they may not be made: without the knob, while captured, under torchrun, after the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    Fleet,
    FleetAlgoKnobFaultTolerance,
    FleetAlgoKnobTopologyCapacity,
    FleetParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpFaultToleranceUnsupportedError,
    available_backends,
    create_fleet,
    supports_fault_tolerance,
)
from moefleet.fleet import tolerance

pytestmark = pytest.mark.timeout(60)

ALONE = BootstrapConfig(1, 0)
PARAMS = FleetParams(4, 4, 8)

CALLS: dict[str, Callable[[Fleet], Any]] = {
    "query_fault": lambda fleet: fleet.query_fault(),
    "query_active_mask": lambda fleet: fleet.query_active_mask(),
    "set_active_mask": lambda fleet: fleet.set_active_mask([1]),
    "reconcile_active_mask": lambda fleet: fleet.reconcile_active_mask(),
    "clear_faults": lambda fleet: fleet.clear_faults(),
    "clear_faults(readmit)": lambda fleet: fleet.clear_faults(readmit=True),
    "update_topology": lambda fleet: fleet.update_topology(ALONE),
}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with create_fleet(ALONE, PARAMS, [FleetAlgoKnobFaultTolerance()], "shm") as built:
        yield built


@pytest.mark.parametrize("name", CALLS)
def test_a_call_works_on_a_fleet_that_has_the_knob(fleet: Fleet, name: str) -> None:
    assert fleet.supports_fault_tolerance
    CALLS[name](fleet)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_runs_under_capture(fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 30: a fault query inside a capture froze "no fault" into the graph."""
    monkeypatch.setattr(tolerance, "capturing", lambda: True)
    with pytest.raises(MoEEpFaultToleranceUnsupportedError, match="under CUDA-graph capture"):
        CALLS[name](fleet)


def test_each_call_says_why_it_cannot_be_captured(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "capturing", lambda: True)
    reasons = set()
    for name, call in CALLS.items():
        with pytest.raises(MoEEpFaultToleranceUnsupportedError) as caught:
            call(fleet)
        reasons.add(str(caught.value).split(": ", 1)[1])
        assert str(caught.value).startswith(name.split("(")[0])
    assert len(reasons) == len(CALLS) - 1  # both kinds of clear_faults are one call


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_stopped_by_its_own_guard_alone(fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a call whose guard is taken away runs under capture, and no other call does."""
    guard, mutant = tolerance.FaultTolerantFleet._guard, name.split("(")[0]

    def without_one(self: tolerance.FaultTolerantFleet, call: str, why: str) -> Any:
        return self.agreement if call == mutant else guard(self, call, why)

    monkeypatch.setattr(tolerance, "capturing", lambda: True)
    monkeypatch.setattr(tolerance.FaultTolerantFleet, "_guard", without_one)
    CALLS[name](fleet)
    for other in CALLS:
        if not other.startswith(mutant):
            with pytest.raises(MoEEpFaultToleranceUnsupportedError, match="under CUDA-graph capture"):
                CALLS[other](fleet)


class Elsewhere(Fleet):
    """A transport from another package, written before there was fault tolerance."""

    name = "elsewhere"

    def __init__(self) -> None:
        pass

    def create_handle(self, params: Any, algo_knobs: Any = ()) -> Any:
        raise AssertionError

    def destroy(self) -> None:
        pass


@pytest.mark.parametrize("name", CALLS)
def test_without_the_knob_each_call_says_so(name: str) -> None:
    for knobs in ([], [FleetAlgoKnobFaultTolerance(enabled=False)]):
        with create_fleet(ALONE, PARAMS, knobs, "shm") as plain:
            assert not plain.supports_fault_tolerance and plain.active_mask_epoch == 0
            with pytest.raises(MoEEpFaultToleranceUnsupportedError, match="give FleetAlgoKnobFaultTolerance"):
                CALLS[name](plain)
    with pytest.raises(MoEEpFaultToleranceUnsupportedError, match="elsewhere Fleet"):
        CALLS[name](Elsewhere())


@pytest.mark.parametrize("name", CALLS)
def test_after_destroy_each_call_says_so(name: str) -> None:
    built = create_fleet(ALONE, PARAMS, [FleetAlgoKnobFaultTolerance()], "shm")
    built.destroy()
    with pytest.raises(MoEEpError, match="destroyed"):
        CALLS[name](built)


def test_which_transports_support_it() -> None:
    """Asking never raises, not even for a name that nobody has."""
    assert supports_fault_tolerance("shm")
    assert not supports_fault_tolerance("torch_dist")
    assert not supports_fault_tolerance("no such transport")
    assert all(supports_fault_tolerance(name) in (True, False) for name in available_backends())


def test_a_transport_without_it_refuses_the_knob() -> None:
    with pytest.raises(MoEEpConfigError, match="FleetAlgoKnobFaultTolerance"):
        create_fleet(ALONE, PARAMS, [FleetAlgoKnobFaultTolerance()], "torch_dist")


def test_torchrun_ends_all_workers_so_it_is_refused_unless_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for backend in ("shm", "auto"):
        with pytest.raises(MoEEpConfigError, match="ends all workers"):
            create_fleet(ALONE, PARAMS, [FleetAlgoKnobFaultTolerance()], backend)
    create_fleet(ALONE, PARAMS, [FleetAlgoKnobFaultTolerance(enabled=False)], "shm").destroy()
    create_fleet(ALONE, PARAMS, [FleetAlgoKnobFaultTolerance(supervised=True)], "shm").destroy()


def test_wrong_arguments_are_named(fleet: Fleet) -> None:
    for timeout_s in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(MoEEpConfigError, match="timeout_s"):
            fleet.reconcile_active_mask(timeout_s=timeout_s)
    with pytest.raises(MoEEpConfigError, match="algo_knobs"):
        fleet.update_topology(ALONE, [FleetAlgoKnobTopologyCapacity(2)])
    knobs = [FleetAlgoKnobFaultTolerance(), FleetAlgoKnobTopologyCapacity(1)]
    with create_fleet(ALONE, PARAMS, knobs, "shm") as small, pytest.raises(MoEEpConfigError, match="capacity, 1"):
        small.update_topology(BootstrapConfig(2, 0))


def test_the_mask_is_int32_and_can_be_written_to_a_tensor_of_the_callers(fleet: Fleet) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    assert fleet.query_active_mask(out) is out
    assert out.dtype == fleet.query_active_mask().dtype == torch.int32
    assert out.tolist() == [1]
