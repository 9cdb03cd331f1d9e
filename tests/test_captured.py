"""Captured forwards without a GPU: who may replay what, and when. Recording is replaced by running eagerly."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    FleetParams,
    GroupedGemmConfig,
    MoEEpConfigError,
    MoEEpError,
    MoEEpLayer,
    MoEEpNotBuiltError,
    MoEEpTensors,
    Placement,
    ShmConfig,
    SplitConfig,
    UnquantizedMoEWeights,
    captured,
    probe,
)
from moefleet.transports.shm import ShmFleet

PARAMS = FleetParams(num_experts=3, max_tokens_per_rank=8, token_hidden_size=4, dtype_bytes=4, max_topk=2)


def tensors(tokens: int, seed: int = 0) -> MoEEpTensors:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 3, (tokens, 2), generator=g)
    return MoEEpTensors(torch.randn(tokens, 4, generator=g), ids, torch.rand(tokens, 2, generator=g))


def weights(seed: int = 0) -> UnquantizedMoEWeights:
    g = torch.Generator().manual_seed(seed)
    return UnquantizedMoEWeights(torch.randn(3, 12, 4, generator=g), torch.randn(3, 4, 6, generator=g))


@pytest.fixture
def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shm Fleet passes for one whose steps can be captured; a replay runs the step eagerly."""
    able = dataclasses.replace(probe("shm"), features=frozenset({"graphs"}))
    monkeypatch.setattr(ShmFleet, "probe", classmethod(lambda cls: able))

    def record(fleet: Any, step: Any, inputs: MoEEpTensors) -> Any:
        output = torch.empty_like(step(inputs)) if inputs.output is None else inputs.output
        return output, lambda: step(dataclasses.replace(inputs, output=output))

    monkeypatch.setattr(captured, "record", record)


@pytest.fixture
def layer() -> Any:
    backend = SplitConfig(ShmConfig(), GroupedGemmConfig())
    with MoEEpLayer(BootstrapConfig(1, 0, device="cpu"), PARAMS, weights(), backend=backend) as layer:
        yield layer


def test_a_cpu_transport_says_why_not(layer: MoEEpLayer) -> None:
    with pytest.raises(MoEEpNotBuiltError, match="'shm' cannot be captured: its tensors live on the CPU"):
        layer.capture(tensors(3))
    assert layer(tensors(3)).shape == (3, 4)


@pytest.mark.usefixtures("capturable")
def test_sizes_in_any_order_beside_eager_steps(layer: MoEEpLayer) -> None:
    forwards = {tokens: layer.capture(tensors(tokens)) for tokens in (0, 1, 8)}
    for number, tokens in enumerate((8, 1, 0, 8, 3, 1, 8)):
        given = tensors(tokens, seed=number)
        want = layer(given)
        got = forwards[tokens](given) if tokens in forwards else layer(given)
        assert torch.equal(got, want)
    kept = forwards[8].replay()
    assert kept is forwards[8].output and forwards[8].replay() is kept


@pytest.mark.usefixtures("capturable")
def test_inputs_are_copies_that_the_caller_refills(layer: MoEEpLayer) -> None:
    given = tensors(5)
    want = layer(given)
    forward = layer.capture(given)
    given.hidden_states.fill_(float("nan")), given.topk_ids.fill_(-1), given.topk_weights.zero_()
    assert torch.equal(forward.replay(), want)
    forward.inputs.topk_weights.mul_(2)  # weights and ids are read again at each replay
    torch.testing.assert_close(forward.replay(), 2 * want)
    forward.inputs.topk_ids.fill_(-1)
    assert not forward.replay().any()


@pytest.mark.usefixtures("capturable")
def test_the_callers_output_is_written(layer: MoEEpLayer) -> None:
    given, place = tensors(5), torch.full((5, 4), float("nan"))
    forward = layer.capture(dataclasses.replace(given, output=place))
    assert forward.replay() is place
    assert torch.equal(place, layer(given))


@pytest.mark.usefixtures("capturable")
def test_other_shapes_are_refused(layer: MoEEpLayer) -> None:
    forward = layer.capture(tensors(5))
    before = forward.replay().clone()
    wrong = dataclasses.replace(tensors(5, seed=1), topk_ids=torch.zeros(5, 1, dtype=torch.int64))
    for each in (tensors(4), wrong):
        with pytest.raises(MoEEpConfigError, match="as captured; capture one forward for each number of tokens"):
            forward(each)
    with pytest.raises(MoEEpConfigError, match="got tensors hidden_states, topk_ids, topk_weights, scales"):
        forward(dataclasses.replace(tensors(5), scales=torch.zeros(5, 1)))
    assert torch.equal(forward.replay(), before), "a refused call changes nothing"


@pytest.mark.usefixtures("capturable")
def test_it_ends_with_what_it_was_made_for(layer: MoEEpLayer) -> None:
    forward = layer.capture(tensors(2))
    layer.replace_weights(weights(1))
    with pytest.raises(MoEEpError, match="weights were replaced; capture again"):
        forward.replay()
    again = layer.capture(tensors(2))
    assert torch.equal(again.replay(), layer(tensors(2)))
    layer.fleet.placement = Placement.contiguous(3, 1)  # what a change of topology leaves
    with pytest.raises(MoEEpError, match="other ranks since update_topology; capture again"):
        again.replay()
    last = layer.capture(tensors(2))
    layer.destroy()
    for _ in range(2):
        with pytest.raises(MoEEpError, match="its layer was destroyed"):
            last.replay()
    last.end()


@pytest.mark.usefixtures("capturable")
def test_another_device_is_refused(layer: MoEEpLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = layer.capture(tensors(2))
    forward.output = torch.empty(2, 4, device="meta")  # never read
    monkeypatch.setattr(type(forward), "_current_device", lambda self: torch.device("cuda", 1))
    with pytest.raises(MoEEpConfigError, match="replay on the device of the capture"):
        forward.replay()
