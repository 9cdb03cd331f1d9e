"""The suite itself: which transports a run exercises, and that a run of none is a failed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moefleet import MoEEpUnknownBackendError, available_backends
from tests.conformance.transports import chosen

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_run_without_any_transport_fails() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/conformance/test_lifetime.py"]
    ran = subprocess.run([*command, "--device", "meta"], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert "no transport is available here" in ran.stdout
    assert "no transport carried anything" in ran.stdout
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr


def test_an_unknown_transport_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MoEEpUnknownBackendError, match="nonsense"):
        chosen("nonsense", "cpu")
    monkeypatch.setenv("MOEFLEET_TRANSPORTS", "other, nonsense")
    with pytest.raises(MoEEpUnknownBackendError, match="other"):
        chosen(None, "cpu")


def test_a_transport_asked_for_by_name_must_be_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEFLEET_TRANSPORTS", raising=False)
    found, left_out = chosen(None, "cpu")
    assert {*left_out} | {transport.name for transport in found} == {*available_backends()}
    assert chosen(None, "meta")[0] == []
    for name in [transport.name for transport in found]:
        assert [transport.name for transport in chosen(name, "cpu")[0]] == [name]
        with pytest.raises(
            LookupError, match=f"transport '{name}' is not available: its tensors live on .*not on meta"
        ):
            chosen(name, "meta")
