"""Names to transports: registering, probing, and what "auto" would try."""

from __future__ import annotations

from typing import Any

import pytest

from moefleet import (
    BootstrapConfig,
    Capability,
    EpLayout,
    Fleet,
    FleetParams,
    Limits,
    MoEEpConfigError,
    MoEEpNotBuiltError,
    MoEEpUnknownBackendError,
    ShmConfig,
    available_backends,
    probe,
    register_fleet,
    supports_fault_tolerance,
)
from moefleet.fleet import fleet_class, registry

BUILT_IN = registry.BUILT_IN
LIMITS = Limits(device_types=frozenset({"cpu"}), layouts=frozenset({EpLayout.FLAT}))


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transport of other people's, and what a test registers is forgotten."""
    monkeypatch.setattr(registry, "_fleets", {name: cls for name, cls in registry._fleets.items() if name in BUILT_IN})
    monkeypatch.setattr(registry, "entry_points", lambda **selection: ())


def registered(name: str, answer: Any) -> type[Fleet]:
    """A Fleet whose probe gives, or raises, this answer."""

    @register_fleet(name)
    class Some(Fleet):
        @classmethod
        def probe(cls) -> Capability:
            if isinstance(answer, Exception):
                raise answer
            return answer

        def create_handle(self, params: Any, algo_knobs: Any = ()) -> Any: ...

        def destroy(self) -> None: ...

    return Some


def test_a_decorated_class_is_known_by_its_name() -> None:
    cls = registered("zebra", Capability(True))
    assert cls.name == "zebra"
    assert fleet_class("zebra") is cls
    assert "zebra" in available_backends()


def test_ours_come_first_in_the_order_of_preference_then_others_by_name() -> None:
    registered("zebra", Capability(True)), registered("aardvark", Capability(True))
    names = available_backends()
    ours = [name for name in names if name in registry.PREFERENCE]
    assert ours == [name for name in registry.PREFERENCE if name in names]
    assert names == (*ours, "aardvark", "zebra")
    assert "shm" in ours


def test_an_unknown_name_lists_those_there_are() -> None:
    for call in (fleet_class, probe):
        with pytest.raises(MoEEpUnknownBackendError, match=r"backend: got 'nope', allowed auto, .*shm") as caught:
            call("nope")
        assert isinstance(caught.value, KeyError) and isinstance(caught.value, ValueError)


def test_a_probe_holds_the_limits_against_the_parameters() -> None:
    registered("zebra", Capability(True, features=frozenset({"graphs"}), limits=LIMITS, domain="here"))
    assert probe("zebra").available
    refused = probe("zebra", BootstrapConfig(2, 0), FleetParams(4, 4, 4))
    assert (refused.available, refused.domain, refused.features) == (False, "here", frozenset({"graphs"}))
    assert "zebra: layout: got EXPERT_MAJOR, allowed FLAT" in refused.reason
    assert probe("zebra", None, FleetParams(4, 4, 4)).reason == refused.reason


def test_a_probe_that_says_no_is_not_held_against_anything() -> None:
    no = Capability(False, "no such device", limits=LIMITS)
    registered("zebra", no)
    assert probe("zebra", None, FleetParams(4, 4, 4)) is no


def test_a_no_is_not_remembered() -> None:
    """A capability probe that ran too early was remembered as a no."""
    answers = [Capability(False, "too early"), Capability(True)]

    @register_fleet("zebra")
    class Late(registered("later", None)):  # type: ignore[misc]
        @classmethod
        def probe(cls) -> Capability:
            return answers.pop(0)

    assert not probe("zebra").available
    assert probe("zebra").available


def test_a_probe_that_raises_is_a_no_with_the_reason() -> None:
    registered("zebra", OSError("no such library"))
    assert probe("zebra") == Capability(False, "its probe failed: OSError('no such library')")


def test_a_module_that_cannot_be_imported_is_a_no_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "zebra", "moefleet.transports.zebra")
    assert "transport 'zebra' cannot be imported: No module named 'moefleet.transports.zebra'" in probe("zebra").reason
    with pytest.raises(MoEEpNotBuiltError, match="transport 'zebra' cannot be imported"):
        fleet_class("zebra")


def test_supports_fault_tolerance_never_raises() -> None:
    registered("yes", Capability(True, features=frozenset({"fault_tolerance"})))
    registered("absent", Capability(False, "no device", features=frozenset({"fault_tolerance"})))
    registered("plain", Capability(True))
    registered("raises", OSError("no such library"))
    answers = {name: supports_fault_tolerance(name) for name in ("yes", "absent", "plain", "raises", "nope")}
    assert answers == {"yes": True, "absent": False, "plain": False, "raises": False, "nope": False}


def test_a_backend_is_a_name_or_a_config() -> None:
    assert registry.config_name("auto") == ("auto", None)
    assert registry.config_name(ShmConfig(spin_us=3.0)) == ("shm", ShmConfig(spin_us=3.0))
    with pytest.raises(MoEEpConfigError, match='backend: got a int, allowed "auto", a name, or'):
        registry.config_name(5)  # type: ignore[arg-type]
