"""What of the measurements on GPUs needs none: names, reasons, records, the table."""

from __future__ import annotations

import json
import math

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moefleet import EpLayout, FleetAlgoKnobFaultTolerance, MoEEpConfigError, NVLinkConfig
from moefleet.bench import gpu_timing
from moefleet.bench.cases import CommCase, payload
from moefleet.bench.gpu import GpuResult, GpuRun, Timed
from moefleet.bench.gpu_candidate import options_of
from moefleet.bench.gpu_peers import PEERS
from moefleet.bench.gpu_report import gpu_json, gpu_records, gpu_table
from moefleet.bench.gpu_timing import in_turn
from moefleet.cli import app

CASE = CommCase(2, 16, 7168, 256, 8, dtype=torch.bfloat16)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")


def test_a_transport_may_bring_its_options() -> None:
    assert options_of("torch_dist") == ("torch_dist", [])
    assert options_of("nvlink:programs=32:senders=16:count=0") == (NVLinkConfig(32, 16, count=False), [])
    assert options_of("nvlink:faults=1") == (NVLinkConfig(), [FleetAlgoKnobFaultTolerance()])
    for wrong in ("nvlink:programs", "nvlink:warps=4", "shm:programs=4"):
        with pytest.raises(MoEEpConfigError, match=r"nvlink:programs=N:senders=N:count=0:faults=1"):
            options_of(wrong)


@without_gpu
def test_peers_say_why_they_are_left_out() -> None:
    assert "nccl.ep cannot be imported: ModuleNotFoundError" in PEERS["nccl_ep"].why_not(CASE)
    assert "nixl_ep_cu13 cannot be imported" in PEERS["nixl_ep"].why_not(CASE)


@without_gpu
@pytest.mark.parametrize("command", ["comm", "layer", "model"])
def test_without_a_gpu_the_commands_say_so(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--device", "cuda"], env={"COLUMNS": "200"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --device cuda: this machine has no CUDA GPU; leave it out for CPU ranks\n"


def test_each_round_another_one_is_first() -> None:
    names = {"a": 0, "b": 0, "c": 0}
    assert [in_turn(names, number) for number in (0, 1, 5)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert in_turn({}, 3) == []


class CountingEvent:
    """What is counted takes a millisecond."""

    done = 0

    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None:
        self.at = CountingEvent.done

    def elapsed_time(self, other: CountingEvent) -> float:
        return float(other.at - self.at)


def test_eager_steps_are_timed_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        CountingEvent.done += 1

    monkeypatch.setattr(torch.cuda, "Event", CountingEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "meet", lambda: None)
    monkeypatch.setattr(gpu_timing, "slowest", dict)
    assert gpu_timing.eager_us({"one": step}, rounds=2, runs=3) == {"one": 1000.0}
    assert CountingEvent.done == 2 * (5 + 3 * gpu_timing.TOGETHER)


def test_records_hold_times_against_the_links_and_the_first_candidate() -> None:
    timed = {
        "nvlink": Timed(graph=20.0, eager=40.0, dispatch=12.0, combine=10.0, error=0.2),
        "torch_dist": Timed(eager=80.0, dispatch=50.0, combine=30.0, error=1.5),
    }
    run = GpuRun([GpuResult(CASE, timed, {"nixl_ep": "no such module"})], push_gbps=300.0, gpu="a GPU")
    ours, other = gpu_records(run)
    sent = payload(CASE)["both"].mean
    assert ours.floor_us == pytest.approx(sent / 300e3, abs=0.01) and ours.floor_share == pytest.approx(
        sent / 300e3 / 20, abs=1e-4
    )
    assert (ours.ratio, other.ratio) == (1.0, 2.0), "eager against eager where one has no graph"
    assert (ours.valid, other.valid, other.graph_us) == (True, False, None)
    first, second, left_out = json.loads(gpu_json([ours, other], run))
    assert first["graph_us"] == 20.0 and second["graph_us"] is None
    assert left_out["candidate"] == "nixl_ep" and left_out["left_out"] == "no such module"
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(gpu_table([ours, other], run))
    text = console.export_text()
    assert "each rank pushes 300 GB/s" in text and "torch_dist WRONG" in text and "expert_major T=16 uniform" in text


def test_a_run_without_links_has_no_floor() -> None:
    run = GpuRun([GpuResult(CASE, {"nvlink": Timed(graph=20.0, error=math.nan)}, {})], gpu="a GPU")
    (record,) = gpu_records(run)
    assert record.floor_us is None and record.push_gbps is None and not record.valid
    assert CASE.layout is EpLayout.EXPERT_MAJOR
