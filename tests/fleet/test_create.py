"""create_fleet: what ranks agree on, which transport "auto" takes, and what it says about the others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from moefleet import (
    BootstrapConfig,
    Capability,
    EpLayout,
    Fleet,
    FleetAlgoKnobAllocator,
    FleetAlgoKnobNumQpsPerRank,
    FleetParams,
    HandleAlgoKnobSplitOperation,
    Limits,
    MoEEpConfigError,
    MoEEpNotBuiltError,
    MoEEpPeerError,
    MoEEpUnknownBackendError,
    ShmConfig,
    create_fleet,
    register_fleet,
)
from moefleet.fleet import FleetSpec, Meeting, registry
from moefleet.fleet.create import agree
from moefleet.placement import Placement
from tests.fleet.threads import side_by_side

PARAMS = FleetParams(4, 8, 16)
LIMITS = Limits(device_types=frozenset({"cpu"}), layouts=frozenset(EpLayout))
FLAT_ONLY = replace(LIMITS, layouts=frozenset({EpLayout.FLAT}))


class Paper(Fleet):
    """Moves nothing, and remembers what it was built from."""

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        self.spec = spec

    def create_handle(self, params: Any, algo_knobs: Any = ()) -> Any: ...

    def destroy(self) -> None: ...


@pytest.fixture(autouse=True)
def only_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transport but those of a test."""
    monkeypatch.setattr(registry, "_fleets", {})
    monkeypatch.setattr(registry, "BUILT_IN", {})


def paper(name: str, capability: Capability = Capability(True, limits=LIMITS), **members: Any) -> type[Paper]:  # noqa: B008
    """Register a transport that gives this answer when it is probed."""
    return register_fleet(name)(type(name, (Paper,), {"probe": classmethod(lambda cls: capability), **members}))


def build(bootstrap: BootstrapConfig, backend: Any = "auto", params: FleetParams = PARAMS, knobs: Any = ()) -> Paper:
    return create_fleet(bootstrap, params, knobs, backend)  # type: ignore[return-value]


# "auto".


def test_auto_takes_the_first_in_the_order_of_preference(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("torch_dist", "other", "shm", "nvlink"):
        paper(name)
    caplog.set_level(logging.INFO, logger="moefleet")
    fleets = side_by_side(2, build)
    assert [fleet.name for fleet in fleets] == ["nvlink", "nvlink"]
    assert fleets[0].passed_over == {}
    assert "nvlink EXPERT_MAJOR rank 0 of 2, 4 experts (2 here)" in caplog.text


def test_auto_says_why_it_passed_each_one_over(caplog: pytest.LogCaptureFixture) -> None:
    paper("nvlink", Capability(False, "no CUDA GPU"))
    paper("nccl_ep", Capability(True, limits=FLAT_ONLY))
    paper("nixl_ep", Capability(True, limits=replace(LIMITS, max_world_size=1)))
    paper("shm", probe=classmethod(lambda cls: 1 / 0))
    paper("torch_dist")
    caplog.set_level(logging.INFO, logger="moefleet")
    for fleet in side_by_side(2, build):
        assert fleet.name == "torch_dist"
        assert fleet.passed_over == {
            "nvlink": "rank 0: no CUDA GPU",
            "nccl_ep": "rank 0: nccl_ep: layout: got EXPERT_MAJOR, allowed FLAT; choose another backend",
            "nixl_ep": "rank 0: nixl_ep: world_size: got 2, allowed at most 1; choose another backend",
            "shm": "rank 0: its probe failed: ZeroDivisionError('division by zero')",
        }
    assert "not nvlink: rank 0: no CUDA GPU; not nccl_ep: rank 0" in caplog.text


def test_auto_looks_for_one_that_honours_the_knobs() -> None:
    paper("shm")
    paper("torch_dist", knobs=frozenset({FleetAlgoKnobNumQpsPerRank}))
    knobs = [FleetAlgoKnobNumQpsPerRank(4)]
    for fleet in side_by_side(2, build, "auto", PARAMS, knobs):
        assert fleet.name == "torch_dist"
        assert fleet.spec.knobs == tuple(knobs)
        assert "shm honours: none" in fleet.passed_over["shm"]


def by_rank(answers: list[Capability]) -> Any:
    """A probe that answers differently on each rank; threads are told apart by their order of asking."""
    pending = list(answers)
    return classmethod(lambda cls: pending.pop(0))


def test_ranks_in_different_domains_cannot_share_a_transport() -> None:
    paper("shm", probe=by_rank([Capability(True, limits=LIMITS, domain=host) for host in ("one host", "another")]))
    paper("torch_dist")
    for fleet in side_by_side(2, build):
        assert fleet.name == "torch_dist"
        assert fleet.passed_over["shm"] == (
            "rank 1 is in another domain than rank 0 (host, network namespace, user or fabric)"
        )


def test_what_only_some_ranks_can_use_is_passed_over() -> None:
    paper("shm", probe=by_rank([Capability(True, limits=LIMITS), Capability(False, "sandboxed")]))
    paper("torch_dist")
    for fleet in side_by_side(2, build):
        assert fleet.name == "torch_dist"
        assert fleet.passed_over["shm"] in ("rank 0: sandboxed", "rank 1: sandboxed")


def test_if_nothing_fits_every_reason_is_listed() -> None:
    paper("shm", Capability(False, "needs Linux"))
    paper("other", Capability(True, limits=FLAT_ONLY))
    for error in side_by_side(2, build):
        assert isinstance(error, MoEEpNotBuiltError)
        assert str(error).startswith(
            "no transport fits this group: shm: rank 0: needs Linux; other: rank 0: other: layout"
        )


# A backend by name.


def test_a_name_that_is_not_usable_says_why() -> None:
    paper("shm", Capability(False, "needs Linux"))
    for error in side_by_side(2, build, "shm"):
        assert isinstance(error, MoEEpNotBuiltError)
        assert str(error) == "backend 'shm' is not usable: shm: rank 0: needs Linux"


def test_a_name_whose_limits_do_not_fit_is_a_config_error() -> None:
    paper("shm", Capability(True, limits=FLAT_ONLY))
    for error in side_by_side(2, build, "shm"):
        assert isinstance(error, MoEEpConfigError)
        assert "shm: layout: got EXPERT_MAJOR, allowed FLAT" in str(error)


def test_an_unknown_name() -> None:
    paper("shm")
    for error in side_by_side(2, build, "nope"):
        assert isinstance(error, MoEEpUnknownBackendError) and "auto, shm" in str(error)


def test_a_config_reaches_its_transport() -> None:
    paper("shm")
    for fleet in side_by_side(2, build, ShmConfig(spin_us=7.0)):
        assert fleet.spec.config == ShmConfig(spin_us=7.0)
        assert fleet.passed_over == {}


# A rank that fails.


def break_down(self: Any, spec: FleetSpec) -> None:
    Fleet.__init__(self, spec)
    if spec.bootstrap.rank == 1:
        raise MemoryError("no room for buffers")
    spec.meeting.exchange("ready", dict)


def test_a_rank_whose_transport_cannot_be_built_is_named() -> None:
    paper("shm", __init__=break_down)
    errors = side_by_side(3, build, "shm")
    assert isinstance(errors.pop(1), MemoryError)
    for error in errors:
        assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
        assert str(error) == "rank 1 could not build the Fleet: MemoryError: no room for buffers"


def mistyped(bootstrap: BootstrapConfig) -> Paper:
    return build(bootstrap, "shn" if bootstrap.rank == 1 else "shm")


def test_an_unknown_name_on_one_rank_is_told() -> None:
    paper("shm")
    errors = side_by_side(2, mistyped)
    assert isinstance(errors[1], MoEEpUnknownBackendError)
    assert isinstance(errors[0], MoEEpPeerError) and "shn" in errors[0].reason


def comes_early(bootstrap: BootstrapConfig, ready: bool) -> Any:
    """Everybody is at the meeting before it has read its weights; rank 1 cannot read them."""
    meeting = Meeting(bootstrap)
    with meeting.announcing():
        if bootstrap.rank == 1 and not ready:
            raise OSError("a file is broken")
        return create_fleet(replace(bootstrap, timeout_s=19.0), PARAMS, backend="shm", meeting=meeting)


def test_a_rank_that_does_not_get_as_far_as_create_fleet() -> None:
    paper("shm")
    errors = side_by_side(3, comes_early, False)
    assert isinstance(errors.pop(1), OSError)
    assert [error.reason for error in errors] == ["OSError: a file is broken"] * 2
    for fleet in side_by_side(3, comes_early, True):
        assert fleet.spec.meeting.bootstrap.timeout_s == 19.0


def test_a_meeting_is_of_one_rank() -> None:
    meeting = Meeting(BootstrapConfig(1, 0))
    with pytest.raises(MoEEpConfigError, match="got rank 1 of 2, allowed rank 0 of 1"):
        create_fleet(BootstrapConfig(2, 1), PARAMS, backend="shm", meeting=meeting)


# Newcomers.


def joins(bootstrap: BootstrapConfig, newcomer: int, backend: str) -> str:
    """Two ranks run over "shm", and call a third."""
    store = bootstrap.tcp_store
    if bootstrap.rank == newcomer:
        store.wait(["running"])
        return build(bootstrap, backend).name
    two = replace(bootstrap, world_size=2, rank=bootstrap.rank - (bootstrap.rank > newcomer))
    running = Meeting(two)
    running.exchange("hello", dict)
    running.close()
    store.set("running", "")
    meeting = Meeting.next_generation(running, bootstrap)
    spec = FleetSpec(bootstrap, PARAMS, (), None, meeting, "shm", Placement.contiguous(4, 3))
    return agree(spec)[1].name


@pytest.mark.parametrize("newcomer", [0, 2])
def test_a_newcomer_may_leave_the_choice_to_the_running_fleet(newcomer: int) -> None:
    for name in ("nvlink", "shm"):
        paper(name)
    assert side_by_side(3, joins, newcomer, "auto") == ["shm"] * 3


def test_a_newcomer_that_asks_for_another_transport_is_told() -> None:
    for name in ("nvlink", "shm"):
        paper(name)
    for error in side_by_side(3, joins, 2, "nvlink"):
        assert isinstance(error, MoEEpConfigError)
        assert "create_fleet backend: got shm on rank 0 and nvlink on rank 2" in str(error)


# What ranks must agree on.


def one_differs(bootstrap: BootstrapConfig, mine: tuple, other: tuple) -> Paper:
    return build(bootstrap, *(other if bootstrap.rank == 2 else mine))


QPS = [FleetAlgoKnobNumQpsPerRank(1)], [FleetAlgoKnobNumQpsPerRank(2)]
BUSY = ShmConfig(spin_us=1.0)
UNLIKE = {
    "backend": (("shm",), ("other",), "got shm on rank 0 and other on rank 2"),
    "config": ((ShmConfig(),), (BUSY,), f"got {ShmConfig()} on rank 0 and {BUSY} on rank 2"),
    "max_topk": (("shm", PARAMS), ("shm", replace(PARAMS, max_topk=9)), "got 32 on rank 0 and 9 on rank 2"),
    "algo_knobs": (("shm", PARAMS, QPS[0]), ("shm", PARAMS, QPS[1]), "got ['FleetAlgoKnobNumQpsPerRank(n=1)'] on"),
}  # fmt: skip


@pytest.mark.parametrize("field", UNLIKE)
def test_ranks_that_disagree_are_told_alike(field: str) -> None:
    mine, other, told = UNLIKE[field]
    for name in ("shm", "other"):
        paper(name, knobs=frozenset({FleetAlgoKnobNumQpsPerRank}))
    for error in side_by_side(3, one_differs, mine, other):
        assert isinstance(error, MoEEpConfigError), error
        assert str(error).startswith(f"create_fleet {field}: {told}"), error
        assert "allowed the same value on all ranks" in str(error)


def test_knobs_may_be_given_in_any_order() -> None:
    paper("shm", knobs=frozenset({FleetAlgoKnobNumQpsPerRank, FleetAlgoKnobAllocator}))
    knobs = [FleetAlgoKnobNumQpsPerRank(1), FleetAlgoKnobAllocator()]
    outcomes = side_by_side(3, one_differs, ("shm", PARAMS, knobs), ("shm", PARAMS, knobs[::-1]))
    assert [fleet.name for fleet in outcomes] == ["shm"] * 3


def test_one_rank_that_cannot_build_is_named() -> None:
    paper("shm")
    bad = ("shm", PARAMS, [FleetAlgoKnobNumQpsPerRank(1)])
    *others, culprit = side_by_side(3, one_differs, ("shm",), bad)
    assert isinstance(culprit, MoEEpConfigError) and "FleetAlgoKnobNumQpsPerRank" in str(culprit)
    for error in others:
        assert isinstance(error, MoEEpPeerError) and error.rank == 2


@pytest.mark.parametrize("knob", [HandleAlgoKnobSplitOperation(), "fast"], ids=["a_handle_knob", "a_word"])
def test_what_is_no_fleet_knob_is_refused(knob: Any) -> None:
    paper("shm")
    (error,) = side_by_side(1, build, "shm", PARAMS, [knob])
    assert isinstance(error, MoEEpConfigError)
    assert f"algo_knobs: got a {type(knob).__name__}, allowed FleetAlgoKnob values" in str(error)
