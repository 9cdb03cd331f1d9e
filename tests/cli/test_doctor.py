"""`moefleet doctor`: what it finds, also with broken packages around, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moefleet
from moefleet import EpAlgorithm, FleetParams
from moefleet.cli import app
from moefleet.doctor import Backend, backends, examine, kernels, machine, transports, versions
from moefleet.fleet import Capability, registry
from moefleet.transports.nvlink import memory_bytes

PLUGIN = Path(__file__).parents[1] / "fleet" / "plugin"


def doctor(*options: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *options], env={"COLUMNS": "160"})


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody else's transports, one of them broken, and kernels that fail in two ways, as pip would have them."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setattr(registry, "_fleets", dict(registry._fleets))
    info = tmp_path / "their_kernels-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-kernels\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[moefleet.kernels]\nabsent = absent_module:K\nodd = math:no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_tables() -> None:
    result = doctor("--limits")
    assert result.exit_code == 0, result.output
    for text in ("Machine", "cores", "Packages", torch.__version__, "Transports", "shm", "Kernels", "grouped_gemm"):
        assert text in result.output
    assert "Most memory of a rank" in result.output and "4096" in result.output
    assert "max world size" in result.output and "expert_major" in result.output
    assert '"auto" prefers' in result.output
    assert "max world size" not in doctor().output


def test_what_cpu_ranks_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLEET_NATIVE", "0")
    assert "CPU ranks use numpy: MOEFLEET_NATIVE=0 is set" in doctor().output


def test_json() -> None:
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["healthy"] is True
    assert found["machine"]["usable_cores"] >= 1
    assert found["helper"]["available"] is bool(found["helper"]["path"]) is not bool(found["helper"]["reason"])
    assert {each["name"]: each["version"] for each in found["packages"]}["moefleet"] == moefleet.__version__
    by_name = {each["name"]: each for each in found["transports"]}
    assert by_name[found["auto"]]["available"]
    assert by_name["torch_dist"]["limits"]["device_types"] == ["cpu", "cuda"]
    assert by_name["torch_dist"]["limits"]["layouts"] == ["expert_major", "flat", "rank_major"]
    flat = next(each for each in found["fleets"] if each["layout"] == "flat")
    params = FleetParams(256, 4096, 7168, algorithm=EpAlgorithm.HIGH_THROUGHPUT, max_topk=8)
    assert flat["at_most"]["nvlink"] == memory_bytes(params, 8)["total"] < 2e9
    assert {"grouped_gemm", "identity"} <= {each["name"] for each in found["kernels"]}


def test_broken_packages_are_shown_and_not_fatal(plugin: None) -> None:
    found = {each.name: each for each in transports()}
    assert found["loopback"].available and found["loopback"].offered_by == "moefleet-loopback 0.1"
    broken = found["broken"]
    assert not broken.available and "No module named 'moefleet_loopback_missing'" in broken.reason
    assert broken.install == "pip install --upgrade --force-reinstall moefleet-loopback"
    odd = {each.name: each for each in kernels()}
    assert "No module named 'absent_module'" in odd["absent"].reason
    assert "no_such_thing" in odd["odd"].reason and odd["odd"].offered_by == "their-kernels 2.5"
    result = doctor()
    assert result.exit_code == 0, result.output
    for text in (
        "moefleet_loopback_missing",
        "absent_module",
        "[their-kernels 2.5]",
        "--force-reinstall their-kernels",
    ):
        assert text in result.output


@pytest.mark.parametrize("answer", [None, Capability(False, "it rains")])
def test_no_transport_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def probe(name: str) -> Any:
        if answer is None:
            raise OSError("broken")
        return answer

    monkeypatch.setattr(backends, "probe", probe)
    result = doctor()
    assert result.exit_code == 1
    assert "No transport works here." in result.output
    assert ("it rains" if answer else "its probe failed: OSError('broken')") in result.output
    assert json.loads(doctor("--json").stdout)["auto"] is None


@pytest.mark.parametrize(
    ("cuda", "driver", "triton", "line"),
    [
        (None, False, True, ""),
        (None, True, True, "pip install --force-reinstall torch"),
        ("12.8", True, False, 'pip install "moefleet[gpu]"'),
        ("12.8", False, True, ""),
    ],
)
def test_what_would_bring_nvlink(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, driver: bool, triton: bool, line: str
) -> None:
    monkeypatch.setattr(backends, "probe", lambda name: Capability(False, "no"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(backends, "NVIDIA_DRIVER", str(tmp_path if driver else tmp_path / "none"))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object() if triton else None)
    assert {each.name: each.install for each in transports()} == {"nvlink": line, "shm": "", "torch_dist": ""}


def test_missing_packages_have_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("triton", "matplotlib"):
            raise versions.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(versions.metadata, "version", version)
    lines = {each.name: each.install for each in versions.packages() if each.install}
    assert lines == {"triton": 'pip install "moefleet[gpu]"', "matplotlib": 'pip install "moefleet[plot]"'}


def test_gpus_and_who_reaches_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="A GPU", total_memory=2**36, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    found, problem = machine.gpus()
    assert problem == ""
    assert [gpu.reaches for gpu in found] == [(1,), (0,), ()]
    monkeypatch.setattr(backends, "probe", lambda name: Capability(True))
    output = doctor().output
    assert "A GPU, 64.0 GiB, 132 multiprocessors, compute 9.0; reaches the memory of: 1" in output
    assert "reaches the memory of: none" in output


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("no answer")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert machine.gpus() == ((), "the driver does not answer: no answer")


def test_a_diagnosis_is_a_value() -> None:
    found = examine()
    assert found.auto in {each.name for each in found.transports if each.available}
    assert all(isinstance(each, Backend) and (each.available or each.reason) for each in found.transports)


def test_help_has_examples() -> None:
    result = doctor("--help")
    for text in ("--json", "--limits", "Examples", "moefleet doctor --limits"):
        assert text in result.output


def test_the_package_is_a_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "moefleet", "doctor", "--json"],
        capture_output=True, text=True, timeout=100, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["healthy"]
