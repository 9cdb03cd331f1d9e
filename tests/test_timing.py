"""What a layer says of the time its forwards take, and what profilers see of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moefleet import (
    BootstrapConfig,
    FleetParams,
    MoEEpConfigError,
    MoEEpLayer,
    MoEEpTensors,
    SplitConfig,
    timing,
)
from moefleet.timing import PHASES

EXPERTS, HIDDEN, TOKENS = 4, 8, 5
RANGES = {"moefleet.forward", *(f"moefleet.{name}" for name in PHASES)}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def layer(request: pytest.FixtureRequest) -> Iterator[MoEEpLayer]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    transport = "shm" if request.param == "cpu" else "nvlink"
    params = FleetParams(EXPERTS, 8, HIDDEN, dtype_bytes=4)
    bootstrap = BootstrapConfig(1, 0, device=request.param, timeout_s=20)
    with MoEEpLayer(bootstrap, params, None, backend=SplitConfig(transport, "identity")) as layer:
        yield layer


def step(layer: MoEEpLayer) -> MoEEpTensors:
    generator = torch.Generator().manual_seed(0)
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    device = layer.fleet.bootstrap.device
    return MoEEpTensors(x.to(device), ids.to(device), weights.to(device))


def bad(layer: MoEEpLayer) -> MoEEpTensors:
    good = step(layer)
    return MoEEpTensors(good.hidden_states[:, 1:], good.topk_ids, good.topk_weights)


def seen_by_profiler(layer: MoEEpLayer) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(step(layer))
    return {event.key for event in seen.key_averages() if event.key.startswith("moefleet")}


def test_times_are_off_until_asked_for(layer: MoEEpLayer) -> None:
    layer(step(layer))
    with pytest.raises(MoEEpConfigError, match=r"enable_timing\(\)"):
        _ = layer.last_timings_ms
    layer.enable_timing(True)
    assert layer.last_timings_ms == {}, "nothing ran yet"
    layer(step(layer))
    assert list(layer.last_timings_ms) == [*PHASES, "total"]
    layer.enable_timing(False)
    with pytest.raises(MoEEpConfigError):
        _ = layer.last_timings_ms
    assert layer._watch is None, "a forward looks at this and at nothing else"


def test_phases_add_up(layer: MoEEpLayer) -> None:
    layer.enable_timing()
    for _ in range(3):
        layer(step(layer))
        times = layer.last_timings_ms
        assert all(value >= 0 for value in times.values())
        assert sum(times[name] for name in PHASES) <= times["total"] + 0.1


def test_each_phase_has_its_own_time(layer: MoEEpLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    if layer.fleet.bootstrap.device != "cpu":
        pytest.skip("events have no clock that can be set")
    clock = accumulate([0.0, 0.001, 0.002, 0.004, 0.008, 0.016])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    watch = timing.Watch(timing=True, ranges=False)
    with watch.forward(torch.device("cpu")):
        for name in PHASES:
            with watch.phase(name):
                pass
    assert watch.timings_ms() == pytest.approx({"route": 1, "dispatch": 2, "compute": 4, "combine": 8, "total": 31})


def test_watching_changes_no_result(layer: MoEEpLayer) -> None:
    plain = layer(step(layer))
    layer.enable_timing()
    layer.enable_ranges()
    assert torch.equal(layer(step(layer)), plain)


def test_a_forward_that_fails_has_no_times(layer: MoEEpLayer) -> None:
    layer.enable_timing()
    layer.enable_ranges()
    layer(step(layer))
    with pytest.raises(MoEEpConfigError):
        layer(bad(layer))
    assert layer.last_timings_ms == {}
    layer(step(layer))
    assert layer.last_timings_ms["total"] > 0
    assert seen_by_profiler(layer) == RANGES, "no range stayed open"


@pytest.mark.parametrize("flag", ["enable_timing", "enable_ranges"])
def test_a_profiler_sees_the_phases(layer: MoEEpLayer, flag: str) -> None:
    assert seen_by_profiler(layer) == set()
    getattr(layer, flag)()
    assert seen_by_profiler(layer) == RANGES
    getattr(layer, flag)(False)
    assert seen_by_profiler(layer) == set()


def test_flags_are_independent(layer: MoEEpLayer) -> None:
    layer.enable_ranges()
    with pytest.raises(MoEEpConfigError):
        _ = layer.last_timings_ms
    layer.enable_timing()
    layer.enable_ranges(False)
    layer(step(layer))
    assert layer.last_timings_ms


def test_timing_alone_names_no_ranges(layer: MoEEpLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range costs as much as a small phase: without a profiler it would distort what is timed."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a range was named")

    monkeypatch.setattr(timing.profiler, "record_function", refuse)
    layer.enable_timing()
    layer(step(layer))
    assert layer.last_timings_ms
    layer.enable_ranges()
    with pytest.raises(AssertionError, match="a range was named"):
        layer(step(layer))


@pytest.mark.gpu
def test_a_captured_forward_is_not_timed(layer: MoEEpLayer) -> None:
    if layer.fleet.bootstrap.device == "cpu":
        pytest.skip("graphs are of GPUs")
    tensors = step(layer)
    layer.enable_timing()
    for _ in range(2):
        layer(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(tensors)
    assert layer.last_timings_ms == {}
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, layer(tensors))
    assert layer.last_timings_ms["total"] > 0
