"""One formula for where everything lies: nothing overlaps, rows are aligned, and experts do not matter."""

from __future__ import annotations

import math
import mmap
from itertools import pairwise
from typing import Any

import pytest

from moefleet import EpAlgorithm, EpLayout, FleetParams
from moefleet.substrate.control import BLOCK_BYTES, HEADER_BYTES, Operation
from moefleet.transports.shm.layout import SegmentLayout

HIGH, RANK_MAJOR = EpAlgorithm.HIGH_THROUGHPUT, EpLayout.RANK_MAJOR
LOCALS = 3


def pieces(layout: SegmentLayout, params: FleetParams, world: int) -> list[tuple[int, int]]:
    """(begin, end) of everything in a segment."""
    most, slots, row = params.max_tokens_per_rank, params.max_tokens_per_rank * params.max_topk * 4, layout.row_bytes
    found = [(0, BLOCK_BYTES)]
    for step in (0, 1):
        headers = [SegmentLayout.header(phase, step) for phase in (Operation.DISPATCH, Operation.COMBINE)]
        found += [(at, at + HEADER_BYTES) for at in (*headers, SegmentLayout.failure(step))]
        for at, size in (
            (layout.ids[step], slots),
            (layout.weights[step], slots),
            (layout.offsets[step], 16 * world),
            (layout.bound[step], 4 * (params.num_experts + world) if layout.landing else 0),
            (layout.scales[step], most * params.scale_bytes_per_token),
            (layout.tokens[step], most * row),
            (layout.combined[step], params.recv_capacity(world) * row),
        ):
            found.append((at, at + size))
    return sorted(found) + areas(layout, params, world)


def areas(layout: SegmentLayout, params: FleetParams, world: int) -> list[tuple[int, int]]:
    """(begin, end) of what is placed."""
    size = math.prod(params.received_shape(world, LOCALS)) * layout.row_bytes
    return [(at, at + size) for at in (*layout.made, *layout.landing)]


@pytest.mark.parametrize("world", [1, 3, 256])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scale_bytes_per_token": 13},
        {"dtype_bytes": 4, "max_topk": 1},
        {"algorithm": HIGH},
        {"algorithm": HIGH, "max_recv_tokens_per_rank": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("hidden", [1, 5, 100, 7168])
@pytest.mark.parametrize("placed", [False, True], ids=["fetched", "placed"])
def test_nothing_overlaps_and_all_fits(placed: bool, hidden: int, fields: dict[str, Any], world: int) -> None:
    params = FleetParams(9, 7, hidden, **fields)
    layout = SegmentLayout.of(params, world, LOCALS if placed else None)
    found = pieces(layout, params, world)
    for (_, end), (begin, _) in pairwise(found):
        assert end <= begin
    assert found[-1][1] <= layout.size <= found[-1][1] + (mmap.PAGESIZE if placed else 0)
    assert bool(layout.landing) is placed


@pytest.mark.parametrize("fields", [{}, {"layout": RANK_MAJOR}, {"algorithm": HIGH}], ids=str)
def test_peers_write_received_rows_and_nothing_else(fields: dict[str, Any]) -> None:
    params = FleetParams(9, 7, 100, **fields)
    layout = SegmentLayout.of(params, 3, LOCALS)
    assert layout.open_from == layout.landing[0] and layout.open_from % mmap.PAGESIZE == 0
    ends = [end for begin, end in pieces(layout, params, 3) if begin not in layout.landing]
    assert max(ends) <= layout.open_from
    without = SegmentLayout.of(params, 3)
    assert without.open_from == without.allocated == without.size and not without.landing
    if params.layout is EpLayout.EXPERT_MAJOR:
        assert layout.allocated == without.size, "pages of large areas are taken as rows come"
    else:
        assert layout.allocated == layout.size and not layout.made


@pytest.mark.parametrize("hidden, scales", [(5, 0), (100, 13), (7168, 56)])
def test_rows_of_all_segments_are_rows_of_one_table(hidden: int, scales: int) -> None:
    layout = SegmentLayout.of(FleetParams(9, 7, hidden, scale_bytes_per_token=scales), 4)
    for at in (*layout.tokens, *layout.combined):
        assert at % layout.row_bytes == 0 == layout.align % layout.row_bytes
    if scales:
        assert all(at % scales == 0 for at in layout.scales) and layout.align % scales == 0


def test_sizes_do_not_depend_on_experts_but_on_all_slots_and_ranks() -> None:
    """Receive buffers sized with the local experts, or without K, were too small (case 17)."""
    base = SegmentLayout.of(FleetParams(8, 16, 64, max_topk=4), 4)
    assert SegmentLayout.of(FleetParams(999, 16, 64, max_topk=4), 4) == base
    assert SegmentLayout.of(FleetParams(8, 16, 64, max_topk=8), 4).size >= base.size + 2 * 2 * 16 * 4 * 4
    wider = SegmentLayout.of(FleetParams(8, 16, 64, max_topk=4), 8)
    assert wider.size >= base.size + 2 * 16 * 4 * base.row_bytes


def test_fewer_rows_to_receive_take_less_memory() -> None:
    full = SegmentLayout.of(FleetParams(8, 16, 64, algorithm=HIGH), 4)
    less = SegmentLayout.of(FleetParams(8, 16, 64, algorithm=HIGH, max_recv_tokens_per_rank=10), 4)
    assert full.size - less.size == 2 * (4 * 16 - 10) * full.row_bytes
