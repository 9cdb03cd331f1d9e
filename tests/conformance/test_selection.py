"""The suite itself: which transports a run exercises, and that a run of none is a failed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moefleet import MoEEpTimeoutError, MoEEpUnknownBackendError, available_backends, probe
from moefleet.launch import RankResult
from tests import time_limit
from tests.conformance.pool import shared_pool
from tests.conformance.ranks import RESERVE_S, Ranks
from tests.conformance.transports import NCCL_SHARES, Transport, chosen

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


def test_ranks_on_gpus_that_only_one_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(NCCL_SHARES, raising=False)
    capability = probe("torch_dist")
    assert [Transport(name, capability).most_ranks("cuda") for name in ("torch_dist", "nvlink", "mine")] == [2, 4, 2]
    assert Transport("torch_dist", capability).most_ranks("cpu") == 4
    monkeypatch.setenv(NCCL_SHARES, "1")
    assert Transport("torch_dist", capability).most_ranks("cuda") == 4


def test_fewer_ranks_than_a_test_has_elsewhere() -> None:
    """Two will do for most; what needs more is skipped with the reason, as is what needs two where there is one."""
    transport = Transport("torch_dist", probe("torch_dist"))
    two, one = (Ranks(shared_pool(), transport, "cpu", set(), most) for most in (2, 1))
    assert two.world == 2 and two.problem([3, 0, 4]).tokens == [3, 0] and one.problem([3]).tokens == [3]
    with pytest.raises(pytest.skip.Exception, match="needs 3 ranks; torch_dist has at most 2 here"):
        two(print, world=3)
    with pytest.raises(pytest.skip.Exception, match="needs 2 ranks; torch_dist has at most 1 here"):
        one.problem([3, 0, 4])


class HungRanks:
    """In place of a pool: one rank hangs, another raised an error of the same class."""

    def __init__(self) -> None:
        self.timeout_s = 0.0

    def run(self, *call: Any, world_size: int, timeout_s: float) -> list[RankResult]:
        self.timeout_s = timeout_s
        hung, raised = MoEEpTimeoutError("rank 0 stood here"), MoEEpTimeoutError("rank 0 is late")
        return [RankResult(0, None, hung, -15), RankResult(1, None, raised, 1)][-world_size:]


@pytest.mark.timeout(120)
def test_where_ranks_hang_is_told_before_the_time_of_the_test_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_limit.left_s() <= 120, "the limit of this test is known"
    pool: Any = HungRanks()
    on_cpu, on_gpu = (Ranks(pool, Transport("mine", probe("torch_dist")), device, set()) for device in ("cpu", "cuda"))
    for call in (on_cpu, on_cpu.outcomes):
        with pytest.raises(AssertionError, match="rank 0 stood here\nrank 1: MoEEpTimeoutError: rank 0 is late"):
            call(print, world=2)
    assert len(on_cpu.outcomes(print, world=1)) == 1, "an error that fn raised is a value"
    monkeypatch.setattr(time_limit, "left_s", lambda: 150.0)
    for ranks, expected in ((on_cpu, 90.0), (on_gpu, 150.0 - RESERVE_S)):
        ranks.outcomes(print, world=1)
        assert pool.timeout_s == expected
    monkeypatch.setattr(time_limit, "left_s", lambda: 3.0)
    on_cpu.outcomes(print, world=1)
    assert pool.timeout_s == 1.0
