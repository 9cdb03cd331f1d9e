"""Memory against what transports allocate, traffic against numbers made by hand and by drawing routings."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    EpAlgorithm,
    EpLayout,
    FleetAlgoKnobQuantization,
    FleetParams,
    Placement,
    create_fleet,
)
from moefleet.plan.memory import FORMULAS, fleet_memory, inbox_bytes, nvlink, shm, torch_dist
from moefleet.plan.traffic import reach, traffic
from moefleet.substrate.inbox import Inbox
from moefleet.transports.nvlink import memory_bytes
from moefleet.transports.shm.layout import SegmentLayout
from tests.native.needs import needs_the_helper


def params_of(layout: EpLayout, tokens: int = 16, **more: int) -> FleetParams:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    return FleetParams(7, tokens, 32, 4, algorithm, layout, **{"max_topk": 3, **more})


@pytest.mark.parametrize("layout", list(EpLayout))
def test_shm_is_its_segment_and_what_comes_beside_rows(layout: EpLayout) -> None:
    params = params_of(layout, scale_bytes_per_token=8)
    found, segment = shm(params, 3), SegmentLayout.of(params, 3, 3)
    assert found.at_start == segment.allocated
    inbox = Inbox(params, 3, 3)
    output = inbox.output(torch.float32, 3, None)
    routing = sum(0 if t is None else t.nbytes for t in (output.recv_topk_idx, output.recv_topk_weights))
    assert inbox_bytes(params, 3, 3) == inbox._rows.nbytes + inbox._scales.nbytes + routing
    assert inbox_bytes(params, 3, 3, rows=False) == inbox._scales.nbytes + routing
    assert found.at_most == segment.size + 2 * inbox_bytes(params, 3, 3, rows=False)


def test_shm_by_hand() -> None:
    found = shm(params_of(EpLayout.EXPERT_MAJOR), 2)
    rows = 2 * (16 + 2 * 16) * 128  # two sets of M tokens and M*W combined rows
    assert rows < found.at_start < rows + 16384, "and a control block, headers and routing"
    areas = 2 * 2 * 4 * 2 * 16 * 128  # for two sets: rows received, and what experts make of them, [L, M*W, H] each
    assert areas <= found.at_most - found.at_start < areas + mmap.PAGESIZE
    flat = shm(params_of(EpLayout.FLAT), 2)
    assert flat.at_start > 2 * (16 + 2 * 2 * 16) * 128, "rows received are taken at once"


@pytest.mark.parametrize("layout", list(EpLayout))
def test_torch_dist_is_what_its_fleet_allocates(layout: EpLayout) -> None:
    params = params_of(layout)
    with create_fleet(BootstrapConfig(1, 0, device="cpu"), params, backend="torch_dist") as fleet:
        homes = [fleet.home(step, torch.float32) for step in range(2)]  # type: ignore[attr-defined]
        inboxes = [fleet.inbox(step) for step in range(2)]  # type: ignore[attr-defined]
        outputs = [inbox.output(torch.float32, 3, None) for inbox in inboxes]
        tensors = [*homes, *(t for o in outputs for t in (o.expert_tensors, o.recv_topk_idx, o.recv_topk_weights))]
        assert torch_dist(params, 1).at_most == sum(t.nbytes for t in tensors if t is not None)


FP8 = [FleetAlgoKnobQuantization(frozenset({"FP8E4M3"}))]


@pytest.mark.parametrize("layout", list(EpLayout))
@pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_the_helper), "torch_dist"])
def test_what_quantised_rows_allocate(layout: EpLayout, backend: str) -> None:
    params = params_of(layout)
    with create_fleet(BootstrapConfig(1, 0, device="cpu"), params, FP8, backend=backend) as fleet:
        if backend == "torch_dist":
            inboxes = [fleet.inbox(step) for step in range(2)]  # type: ignore[attr-defined]
            taken = sum(fleet.home(step, torch.float32).nbytes for step in range(2))  # type: ignore[attr-defined]
        else:
            inboxes = fleet.buffers.landings  # type: ignore[attr-defined]
            taken = SegmentLayout.of(replace(params, scale_bytes_per_token=4), 1, params.num_experts).size
            taken -= sum(inbox._rows.nbytes for inbox in inboxes)  # they are counted below
        for inbox in inboxes:
            out = inbox.output(torch.uint8 if backend == "torch_dist" else torch.float32, 3, torch.float32)
            parts = inbox._rows, inbox._scales, out.recv_topk_idx, out.recv_topk_weights
            taken += sum(part.nbytes for part in parts if part is not None)
        assert FORMULAS[backend](params, 1, 0, FP8).at_most == taken


@pytest.mark.parametrize("layout", list(EpLayout))
@pytest.mark.parametrize("knobs", [(), FP8])
def test_nvlink_is_its_own_formula(layout: EpLayout, knobs: list[FleetAlgoKnobQuantization]) -> None:
    params = params_of(layout)
    found = nvlink(params, 2, algo_knobs=knobs)
    assert found.at_start == found.at_most == memory_bytes(params, 2, algo_knobs=knobs)["total"]


def test_each_formula_is_of_a_transport_and_grows_with_tokens() -> None:
    for formula in FORMULAS.values():
        small, large = (formula(params_of(EpLayout.FLAT, tokens), 4, 3, ()) for tokens in (16, 64))
        assert small.at_start <= small.at_most < large.at_most


def test_a_gpu_has_no_untouched_pages() -> None:
    params = params_of(EpLayout.FLAT)
    on_cpu, on_gpu = (fleet_memory("torch_dist", params, 4, device) for device in ("cpu", "cuda"))
    assert on_cpu is not None and on_gpu is not None
    assert on_cpu.at_start == 0 < on_gpu.at_start == on_gpu.at_most == on_cpu.at_most
    assert fleet_memory("theirs", params, 4) is None


def test_reach_by_hand() -> None:
    assert reach(4, 2, 1) == 0.5
    assert reach(4, 2, 2) == pytest.approx(1 - 1 / 6)  # of 6 pairs, one avoids both
    assert reach(4, 2, 3) == 1.0
    assert reach(4, 0, 2) == 0.0


def test_reach_tends_to_independent_choices() -> None:
    world, topk = 8, 8
    assert reach(80_000, 10_000, topk) == pytest.approx(1 - (1 - 1 / world) ** topk, rel=1e-3)
    assert reach(64, 8, topk) > 1 - (1 - 1 / world) ** topk, "distinct experts spread more"


def test_traffic_by_hand() -> None:
    # Two ranks with two experts each, top-2: five of six pairs name a given rank.
    params = FleetParams(4, 12, 100, 2, max_topk=2, scale_bytes_per_token=4)
    found = traffic(params, 2, 2)
    assert found.rows_to_each == found.rows == pytest.approx(10)
    assert found.dispatch_bytes == 10 * (200 + 4 + 16)
    assert found.combine_bytes == 10 * 200
    assert found.received_rows == 24, "one for each (token, expert)"
    assert found.rows_per_expert == 12
    assert found.times_fewer == pytest.approx(12 * 2 * 0.5 / 10)
    quantised = traffic(replace(params, scale_bytes_per_token=0), 2, 2, FP8)
    assert (quantised.dispatch_bytes, quantised.combine_bytes) == (10 * (100 + 4 + 16), 10 * 200)
    own = traffic(replace(params, dtype_bytes=1), 2, 2)
    assert (own.dispatch_bytes, own.combine_bytes) == (10 * (100 + 4 + 16), 10 * 200)
    rank_major = traffic(FleetParams(4, 12, 100, layout=EpLayout.RANK_MAJOR), 2, 2)
    assert rank_major.received_rows == pytest.approx(20), "10 of each rank"


def test_one_rank_sends_nothing() -> None:
    found = traffic(FleetParams(4, 12, 100), 1, 2)
    assert (found.rows, found.rows_to_each, found.dispatch_bytes, found.combine_bytes) == (0, 0, 0, 0)
    assert found.times_fewer == 1


@pytest.mark.parametrize(("experts", "world", "topk"), [(16, 4, 3), (7, 3, 2), (2, 3, 1)])
def test_traffic_is_what_uniform_routers_make(experts: int, world: int, topk: int) -> None:
    generator, tokens = torch.Generator().manual_seed(0), 40_000
    ids_TK = torch.rand(tokens, experts, generator=generator).topk(topk, dim=1).indices
    owners_TK = Placement.contiguous(experts, world).owner_table[ids_TK]
    named = torch.zeros(tokens, world).scatter_(1, owners_TK, 1.0).sum() / world  # tokens that name a rank, mean
    found = traffic(FleetParams(experts, tokens, 8), world, topk)
    assert found.rows_to_each == pytest.approx(float(named), rel=0.02)
    assert found.rows == pytest.approx((world - 1) * float(named), rel=0.02)
