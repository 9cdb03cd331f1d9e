"""docs/differences.md: one test for each row of its table, named after the row's key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moefleet as m
from tests.conformance.pool import shared_pool

PAGE = Path(__file__).resolve().parents[1] / "docs/differences.md"
RANK_MAJOR, FLAT = m.EpLayout.RANK_MAJOR, m.EpLayout.FLAT
HT = m.EpAlgorithm.HIGH_THROUGHPUT
ALONE = m.BootstrapConfig(1, 0, device="cpu")
TOLERANT = m.FleetAlgoKnobFaultTolerance()


def sizes(layout: m.EpLayout | None = None, **others: Any) -> m.FleetParams:
    algorithm = HT if layout is FLAT else m.EpAlgorithm.LOW_LATENCY
    return m.FleetParams(4, 6, 8, 4, algorithm=algorithm, layout=layout, **others)


def fleet_of(bootstrap: m.BootstrapConfig, layout: m.EpLayout | None = None, *knobs: Any, **others: Any) -> m.Fleet:
    return m.create_fleet(bootstrap, sizes(layout, **others), knobs, "shm")


def handle_of(fleet: m.Fleet, ids: Any, weights: Tensor | None = None, *knobs: Any) -> m.Handle:
    ids = torch.as_tensor(ids)
    weights = torch.ones(ids.shape) if weights is None else weights
    return fleet.create_handle(m.HandleParams(ids), [m.HandleAlgoKnobTopKWeights(weights), *knobs])


def sent(handle: m.Handle, rows: int, value: float = 1.0) -> m.DispatchOutput:
    return handle.dispatch(m.DispatchInputParams([torch.full((rows, 8), value)]))


def back(handle: m.Handle, rows: Tensor) -> Tensor:
    return handle.combine(m.CombineInputParams([rows])).x


def values(results: Sequence[Any]) -> list[Any]:
    for result in results:
        assert result.error is None, result.error
    return [result.value for result in results]


@pytest.fixture(scope="module")
def plain() -> Iterator[m.Fleet]:
    """EXPERT_MAJOR, one rank."""
    with fleet_of(ALONE) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def by_rank() -> Iterator[m.Fleet]:
    with fleet_of(ALONE, RANK_MAJOR) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def flat() -> Iterator[m.Fleet]:
    with fleet_of(ALONE, FLAT) as fleet:
        yield fleet


@pytest.fixture
def tolerant() -> Iterator[m.Fleet]:
    with fleet_of(ALONE, None, TOLERANT) as fleet:
        yield fleet


@pytest.fixture
def layer() -> Iterator[m.MoEEpLayer]:
    with m.MoEEpLayer(ALONE, sizes(), None, backend=m.SplitConfig("shm", "identity")) as layer:
        yield layer


STEP = m.MoEEpTensors(torch.ones(1, 8), torch.tensor([[0]]), torch.ones(1, 1))


def test_backend_default() -> None:
    for function in (m.create_fleet, m.MoEEpLayer):
        assert inspect.signature(function).parameters["backend"].default == "auto"
    assert m.SplitConfig().comm == "auto"


def test_comm_configs() -> None:
    assert (m.ShmConfig.name, m.TorchDistConfig.name, m.NVLinkConfig.name) == ("shm", "torch_dist", "nvlink")
    assert "name" not in {field.name for field in fields(m.ShmConfig)}


def test_kernel_default() -> None:
    assert m.SplitConfig().kernel == m.GroupedGemmConfig()


def test_kernels_by_name(layer: m.MoEEpLayer) -> None:
    assert layer.kernel.config == m.IdentityConfig()


def test_layer_class() -> None:
    assert isinstance(m.MoEEpLayer, type) and issubclass(m.MoEEpLayer, torch.nn.Module)


def test_layer_builds_at_once() -> None:
    with pytest.raises(m.MoEEpUnknownBackendError):
        m.MoEEpLayer(ALONE, sizes(), None, backend=m.SplitConfig("nobody's", "identity"))


def test_layer_fleet(layer: m.MoEEpLayer) -> None:
    backend = m.SplitConfig(kernel="identity")
    assert m.MoEEpLayer(ALONE, sizes(), None, backend=backend, fleet=layer.fleet).fleet is layer.fleet


def test_layer_timing(layer: m.MoEEpLayer) -> None:
    layer.enable_timing()
    layer(STEP)
    assert {"route", "total"} < set(layer.last_timings_ms)


def test_context_managers() -> None:
    for kind in (m.Fleet, m.Handle, m.MoEEpLayer):
        assert hasattr(kind, "__enter__") and hasattr(kind, "__exit__")


def test_no_dummy_weights(layer: m.MoEEpLayer) -> None:
    assert layer.weights is None
    assert not hasattr(m, "dummy_moe_weights")


def test_weight_pack() -> None:
    w13, w2 = torch.zeros(1, 4, 8), torch.zeros(1, 8, 2)
    assert not isinstance(m.MoEWeightPack, type)
    bare = m.MoEWeightPack(w13, w2, w13_bias=torch.zeros(1, 4), w2_bias=torch.zeros(1, 8))
    assert type(bare) is m.UnquantizedMoEWeights
    packed = m.MoEWeightPack(w13, w2, torch.ones(1), torch.ones(1))
    assert type(packed) is m.PrequantizedMoEWeights and not isinstance(packed, m.UnquantizedMoEWeights)


def test_tensors(layer: m.MoEEpLayer) -> None:
    with pytest.raises(FrozenInstanceError):
        STEP.scales = torch.ones(1)  # type: ignore[misc]
    place = torch.empty(1, 8)
    assert layer(m.MoEEpTensors(STEP.hidden_states, STEP.topk_ids, STEP.topk_weights, output=place)) is place


def test_mega() -> None:
    assert m.MegaConfig("some_kernel").megakernel == "some_kernel"
    with pytest.raises(m.MoEEpError):
        m.MoEEpLayer(ALONE, sizes(), None, [m.FleetAlgoKnobNumChannelsPerRank(2)], m.MegaConfig("some_kernel"))


def test_process_group() -> None:
    """A Fleet over torch_dist, whose collectives go over a group of its own."""
    with m.create_fleet(ALONE, sizes(), backend="torch_dist") as fleet:
        assert fleet.name == "torch_dist"
        assert not torch.distributed.is_initialized()


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert m.BootstrapConfig(1, 0).device is None
    with fleet_of(m.BootstrapConfig(1, 0, device="cpu")) as fleet:
        assert sent(handle_of(fleet, [[0]]), 1).expert_tensors.device == torch.device("cpu")


def test_timeout() -> None:
    (knob,) = (field for field in fields(m.BootstrapConfig) if field.name == "timeout_s")
    assert knob.default == 300.0
    with pytest.raises(m.MoEEpConfigError, match="timeout_s"):
        m.BootstrapConfig(1, 0, timeout_s=0)


def three_experts_on_two(bootstrap: m.BootstrapConfig) -> tuple[int, list[list[int]], list[float]]:
    """Experts here, ids that arrive, and what comes back, where each rank sends a row to all experts."""
    params = m.FleetParams(3, 2, 8, 4, layout=RANK_MAJOR)
    with m.create_fleet(bootstrap, params, backend="shm") as fleet:
        handle = handle_of(fleet, [[0, 1, 2]])
        arrived = sent(handle, 1)
        ids = arrived.recv_topk_idx
        assert ids is not None
        rows = arrived.expert_tensors * (ids >= 0).sum(-1, keepdim=True)
        return fleet.placement.num_local(bootstrap.rank), ids[:, 0].tolist(), back(handle, rows)[0].tolist()


def test_uneven_experts() -> None:
    told = values(shared_pool().run(three_experts_on_two, world_size=2))
    assert [local for local, _, _ in told] == [2, 1]
    assert all(out == [3.0] * 8 for _, _, out in told)


def test_flat_layout() -> None:
    assert m.FleetParams(4, 6, 8, algorithm=HT).layout is FLAT
    assert m.FleetParams(4, 6, 8).layout is m.EpLayout.EXPERT_MAJOR
    with pytest.raises(m.MoEEpConfigError, match="EXPERT_MAJOR with HIGH_THROUGHPUT"):
        m.FleetParams(4, 6, 8, algorithm=HT, layout=m.EpLayout.EXPERT_MAJOR)


def test_flat_shape(flat: m.Fleet) -> None:
    with handle_of(flat, [[0], [1]]) as handle:
        assert sent(handle, 2).expert_tensors.shape == (6 * 1, 8)


def test_flat_counter(flat: m.Fleet) -> None:
    with handle_of(flat, [[0], [1]]) as handle:
        counter = sent(handle, 2).recv_total_counter
        assert counter is not None and counter.tolist() == [2]
    assert m.HandleAlgoKnobNumReceivedTokens(2).target == 2


def test_max_recv() -> None:
    with fleet_of(ALONE, FLAT, max_recv_tokens_per_rank=2) as fleet:
        with pytest.raises(m.MoEEpConfigError, match=r"3.*2"):
            sent(handle_of(fleet, [[0]] * 3), 3)


def test_rank_major_ids(by_rank: m.Fleet) -> None:
    with handle_of(by_rank, [[3, 0], [1, 2]]) as handle:
        ids = sent(handle, 2).recv_topk_idx
        assert ids is not None and ids.dtype == torch.int64 and ids.shape == (1, 6, 2)


def test_ids_local() -> None:
    told = values(shared_pool().run(three_experts_on_two, world_size=2))
    assert told[0][1] == [[0, 1, -1]] * 2
    assert told[1][1] == [[-1, -1, 0]] * 2


def test_num_tokens(plain: m.Fleet) -> None:
    with handle_of(plain, [[0, 1], [0, -1]]) as handle:
        assert sent(handle, 2).get_num_tokens() == 3
    assert "num_tokens" not in {field.name for field in fields(m.DispatchOutput)}


def test_duplicates(plain: m.Fleet) -> None:
    with handle_of(plain, [[2, 2]], torch.tensor([[0.25, 0.5]])) as handle:
        out = back(handle, sent(handle, 1).expert_tensors)
    assert out.tolist() == [[0.75] * 8]


def test_missing_expert(plain: m.Fleet) -> None:
    with handle_of(plain, [[-1, 1], [-1, -1]]) as handle:
        out = back(handle, sent(handle, 2).expert_tensors)
    assert out.tolist() == [[1.0] * 8, [0.0] * 8]


def test_identity_weights() -> None:
    weights = torch.tensor([[0.25, 0.5]])
    for layout in m.EpLayout:
        with m.MoEEpLayer(ALONE, sizes(layout), None, backend=m.SplitConfig("shm", "identity")) as layer:
            out = layer(m.MoEEpTensors(torch.ones(1, 8), torch.tensor([[0, 1]]), weights))
        assert out.tolist() == [[0.75] * 8], layout


def test_id_types(plain: m.Fleet) -> None:
    outs = []
    for dtype in (torch.int32, torch.int64):
        with handle_of(plain, torch.tensor([[3, 1]], dtype=dtype), torch.tensor([[0.1, 0.3]])) as handle:
            outs.append(back(handle, sent(handle, 1).expert_tensors))
    assert torch.equal(*outs)


def test_handle_update(plain: m.Fleet) -> None:
    with handle_of(plain, [[0]]) as handle:
        back(handle, sent(handle, 1).expert_tensors)
        handle.update(m.HandleParams(torch.tensor([[3]])))
        counts = sent(handle, 1).expert_counts
    assert counts is not None and counts.tolist() == [0, 0, 0, 1]


def test_routing_snapshot(plain: m.Fleet) -> None:
    weights = torch.ones(1, 1)
    with handle_of(plain, [[0]], weights) as handle:
        rows = sent(handle, 1).expert_tensors
        weights.fill_(7.0)
        assert back(handle, rows).tolist() == [[1.0] * 8]


def test_send_only_result(plain: m.Fleet) -> None:
    with handle_of(plain, [[0]]) as handle:
        assert handle.dispatch_send_only(m.DispatchInputParams([torch.ones(1, 8)])) is None  # type: ignore[func-returns-value]
        handle.combine_send_only(m.CombineInputParams([handle.dispatch_recv_only().expert_tensors]))
        assert handle.combine_recv_only().x.tolist() == [[1.0] * 8]


def test_combine_buffer(by_rank: m.Fleet) -> None:
    with handle_of(by_rank, [[0]]) as handle:
        arrived = sent(handle, 1)
        buffer = handle.combine_buffer()
        assert buffer is not None and buffer.shape == arrived.expert_tensors.shape
        buffer[0, 0] = 5.0
        assert back(handle, buffer).tolist() == [[5.0] * 8]


def test_knob_bases(plain: m.Fleet) -> None:
    with pytest.raises(m.MoEEpConfigError, match="FleetAlgoKnob values"):
        fleet_of(ALONE, None, m.HandleAlgoKnobSplitOperation())
    with pytest.raises(m.MoEEpConfigError):
        handle_of(plain, [[0]], None, m.FleetAlgoKnobNumChannelsPerRank(2))


def test_knob_never_ignored() -> None:
    with pytest.raises(m.MoEEpConfigError, match="FleetAlgoKnobRdmaBufferSize"):
        fleet_of(ALONE, None, m.FleetAlgoKnobRdmaBufferSize(1 << 20))


def test_quantization_names() -> None:
    assert m.FleetAlgoKnobQuantization({"FP8E4M3"}).quants == {"FP8E4M3"}  # type: ignore[arg-type]


def test_allocator_fields() -> None:
    assert [field.name for field in fields(m.FleetAlgoKnobAllocator)] == ["torch_caching"]


def test_fault_tolerance_ht() -> None:
    with fleet_of(ALONE, FLAT, TOLERANT) as fleet:
        assert fleet.supports_fault_tolerance and not fleet.query_fault()


def test_fault_tolerance_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(m.MoEEpConfigError, match="supervised"):
        fleet_of(ALONE, None, TOLERANT)
    fleet_of(ALONE, None, m.FleetAlgoKnobFaultTolerance(supervised=True)).destroy()


def test_quorum() -> None:
    assert TOLERANT.quorum == "majority"
    assert m.FleetAlgoKnobFaultTolerance(quorum="any").quorum == "any"


def test_renormalize() -> None:
    assert TOLERANT.renormalize is False
    assert m.FleetAlgoKnobFaultTolerance(renormalize=True).renormalize


def test_epochs(tolerant: m.Fleet) -> None:
    tolerant.set_active_mask([1])
    assert tolerant.active_mask_epoch == 0
    tolerant.reconcile_active_mask()
    assert tolerant.active_mask_epoch == 1


def test_mask_is_yours(tolerant: m.Fleet) -> None:
    tolerant.query_active_mask().zero_()
    assert tolerant.query_active_mask().tolist() == [1]


def test_clear_faults_result(tolerant: m.Fleet) -> None:
    assert tolerant.clear_faults().tolist() == [1]


def test_update_topology(plain: m.Fleet, tolerant: m.Fleet) -> None:
    with pytest.raises(m.MoEEpFaultToleranceUnsupportedError):
        plain.update_topology(ALONE)
    with pytest.raises(m.MoEEpConfigError, match="knobs"):
        tolerant.update_topology(ALONE, [TOLERANT])
    assert "placement" in inspect.signature(m.Fleet.update_topology).parameters


def test_errors() -> None:
    kinds = [kind for name, kind in vars(m).items() if name.startswith("MoEEp") and name.endswith("Error")]
    assert len(kinds) > 10 and all(issubclass(kind, m.MoEEpError) for kind in kinds)
    assert not issubclass(m.MoEEpArchError, m.MoEEpConfigError)


def test_available_backends() -> None:
    names = m.available_backends()
    assert isinstance(names, tuple) and {"nvlink", "shm", "torch_dist"} <= set(names)
    for name in names:
        assert m.probe(name).available == (not m.probe(name).reason)


def test_other_packages() -> None:
    from moefleet.fleet.registry import ENTRY_POINT_GROUP

    assert ENTRY_POINT_GROUP == "moefleet.transports"


def test_rows_and_tests_are_the_same() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.M)
    tests = [name for name in globals() if name.startswith("test_") and name != "test_rows_and_tests_are_the_same"]
    assert len(rows) == len(set(rows))
    assert {f"test_{row.replace('-', '_')}" for row in rows} == set(tests)
