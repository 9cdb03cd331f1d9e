"""A transport from somebody else's package: an installed distribution with an entry point, and no line of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpNotBuiltError,
    available_backends,
    create_fleet,
    probe,
    supports_fault_tolerance,
)
from moefleet.fleet import registry
from tests.conformance.pool import shared_pool

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).parent / "plugin"
PARAMS = FleetParams(4, 8, 4, 4)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip would have it, for this process and for ranks, which get their parent's path."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setattr(registry, "_fleets", dict(registry._fleets))


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transport of ours is there."""
    monkeypatch.setattr(registry, "BUILT_IN", {})
    monkeypatch.setattr(registry, "_fleets", {})


def a_step(bootstrap: BootstrapConfig, backend: str) -> tuple[str, torch.Tensor]:
    with create_fleet(bootstrap, PARAMS, backend=backend) as fleet:
        ids, weights = torch.tensor([[0, 3], [2, -1]]), torch.tensor([[0.5, 0.25], [2.0, 1.0]])
        with fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) as handle:
            out = handle.dispatch(DispatchInputParams([torch.ones(2, 4) * (bootstrap.rank + 1)]))
            return fleet.name, handle.combine(CombineInputParams([out.expert_tensors])).x


def test_it_is_listed_after_ours_and_can_be_probed() -> None:
    names = available_backends()
    assert {"broken", "loopback", "relay"} < {*names}
    assert names.index("loopback") > names.index("shm")
    assert probe("loopback").available
    assert probe("relay").available
    assert not supports_fault_tolerance("loopback")
    over = probe("loopback", BootstrapConfig(2, 0), PARAMS)
    assert not over.available and "world_size: got 2, allowed at most 1" in over.reason


def test_it_is_built_by_name() -> None:
    name, y = a_step(BootstrapConfig(1, 0), "loopback")
    assert name == "loopback"
    assert y.tolist() == [[0.75] * 4, [2.0] * 4]


def test_auto_sees_it(nothing_else: None) -> None:
    """By name among other people's: the one whose package is broken is passed over, with the reason."""
    with create_fleet(BootstrapConfig(1, 0), PARAMS) as fleet:
        assert fleet.name == "loopback"
        assert list(fleet.passed_over) == ["broken"]
        assert "transport 'broken' cannot be imported: No module named" in fleet.passed_over["broken"]
        assert "not broken: rank 0: transport 'broken'" in fleet.describe()


def test_ranks_see_it() -> None:
    results = shared_pool().run(a_step, "relay", world_size=2)
    assert [result.error for result in results] == [None, None]
    for rank, result in enumerate(results):
        name, y = result.value
        assert name == "relay"
        assert y.tolist() == [[0.75 * (rank + 1)] * 4, [2.0 * (rank + 1)] * 4]


def test_a_broken_package_asked_for_by_name_says_so() -> None:
    assert not probe("broken").available
    assert "No module named 'moefleet_loopback_missing'" in probe("broken").reason
    with pytest.raises(MoEEpNotBuiltError, match="backend 'broken' is not usable: broken: rank 0: transport 'broken'"):
        create_fleet(BootstrapConfig(1, 0), PARAMS, backend="broken")


@pytest.mark.slow
def test_the_conformance_suite_runs_against_it() -> None:
    """By name, with nothing but the package on the path; what it does not promise is skipped with the reason."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/conformance/test_routing.py"]
    options = ["-o", f"pythonpath=src . {PLUGIN}", "--transports", "loopback", "-k", "every_kind"]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed, 9 skipped" in ran.stdout, ran.stdout
    assert "loopback: world_size: got 4, allowed at most 1" in ran.stdout
