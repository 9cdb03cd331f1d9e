"""Work on the stream that a bootstrap names, without a GPU: what is launched where, and what waits for what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    FleetParams,
    IdentityConfig,
    MoEEpLayer,
    MoEEpTensors,
    ShmConfig,
    SplitConfig,
    captured,
    probe,
)
from moefleet.fleet import streams
from moefleet.fleet.streams import beside, stream_at, stream_of
from moefleet.transports.shm import ShmFleet

GIVEN = 7
WHOLE = ["given waits for here", "dispatch on given", "compute on given", "combine on given", "here waits for given"]


class Cuda:
    """``torch.cuda`` with two streams, and the order in which they are told things."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.capturing = False
        self.now = self.here = self.stream_named("here")
        self.given = self.stream_named("given")

    def stream_named(self, name: str) -> Any:
        def wait(other: Any) -> None:
            self.told.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, device="cuda:0", wait_stream=wait)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def ExternalStream(self, raw: int, device: torch.device) -> Any:  # noqa: N802 - torch's name
        assert (raw, device.type) == (GIVEN, "cuda")
        return self.given

    def default_stream(self, device: torch.device) -> Any:
        return self.here

    def current_stream(self, device: Any = None) -> Any:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def note(self, what: str) -> None:
        self.told.append(f"{what} on {self.now.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_which_stream(cuda: Cuda) -> None:
    gpu = BootstrapConfig(1, 0, stream=GIVEN, device="cuda")
    assert stream_of(gpu) is cuda.given and stream_at(0, torch.device("cuda")) is cuda.here
    assert stream_of(replace(gpu, stream=0)) is None
    assert stream_of(replace(gpu, device="cpu")) is None
    cuda.capturing = True
    assert stream_of(gpu) is None, "the capturing stream takes all"


def test_what_fails_is_waited_for_as_well(cuda: Cuda) -> None:
    with pytest.raises(ZeroDivisionError), beside(cuda.given):
        cuda.note("work")
        raise ZeroDivisionError
    assert cuda.told == ["given waits for here", "work on given", "here waits for given"]
    with beside(None):
        cuda.note("work")
    assert cuda.told[3:] == ["work on here"]


@pytest.fixture
def layer(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose Fleet passes for a GPU's, with a stream, once it is built; what it runs is noted."""
    able = replace(probe("shm"), features=frozenset({"graphs"}))
    monkeypatch.setattr(ShmFleet, "probe", classmethod(lambda cls: able))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda y, stream: cuda.told.append(f"y read on {stream.name}"))
    monkeypatch.setattr("moefleet.layer.torch", SimpleNamespace(cuda=cuda))
    params = FleetParams(num_experts=2, max_tokens_per_rank=4, token_hidden_size=4, dtype_bytes=4, max_topk=1)
    boot = BootstrapConfig(1, 0, device="cpu")
    with MoEEpLayer(boot, params, None, backend=SplitConfig(ShmConfig(), IdentityConfig())) as layer:
        layer.fleet.bootstrap = replace(boot, stream=GIVEN, device="cuda")

        def noted(name: str, call: Any) -> Any:
            def run(*args: Any, **options: Any) -> Any:
                cuda.note(name)
                return call(*args, **options)

            return run

        def route(tensors: MoEEpTensors) -> Any:
            made = original(tensors)
            monkeypatch.setattr(made, "dispatch", noted("dispatch", made.dispatch))
            monkeypatch.setattr(made, "combine", noted("combine", made.combine))
            return made

        original, compute = layer._route, layer._compute
        monkeypatch.setattr(layer, "_route", route)
        monkeypatch.setattr(layer, "_compute", noted("compute", compute))
        yield layer


def tensors() -> MoEEpTensors:
    return MoEEpTensors(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_a_forward_runs_there(layer: MoEEpLayer, cuda: Cuda) -> None:
    layer(tensors())
    assert cuda.told == [*WHOLE, "y read on here"]


def test_a_forward_in_a_capture_stays_where_it_is(layer: MoEEpLayer, cuda: Cuda) -> None:
    cuda.capturing = True
    layer(tensors())
    assert cuda.told == ["dispatch on here", "compute on here", "combine on here"]


def test_a_captured_forward_is_made_and_replayed_there(
    layer: MoEEpLayer, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "record", lambda fleet, step, inputs: (step(inputs), lambda: cuda.note("replay")))
    forward = layer.capture(tensors())
    assert cuda.told == WHOLE
    forward.replay()
    assert cuda.told[len(WHOLE) :] == ["given waits for here", "replay on given", "here waits for given"]
