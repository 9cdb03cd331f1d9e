"""One formula for where everything lies: nothing overlaps, rows are aligned, and experts do not matter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from moefleet import EpAlgorithm, FleetParams
from moefleet.substrate.control import BLOCK_BYTES, HEADER_BYTES, Operation
from moefleet.transports.shm.layout import SegmentLayout

HIGH = EpAlgorithm.HIGH_THROUGHPUT


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
            (layout.scales[step], most * params.scale_bytes_per_token),
            (layout.tokens[step], most * row),
            (layout.combined[step], params.recv_capacity(world) * row),
        ):
            found.append((at, at + size))
    return sorted(found)


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
def test_nothing_overlaps_and_all_fits(hidden: int, fields: dict[str, Any], world: int) -> None:
    params = FleetParams(9, 7, hidden, **fields)
    layout = SegmentLayout.of(params, world)
    found = pieces(layout, params, world)
    for (_, end), (begin, _) in pairwise(found):
        assert end <= begin
    assert found[-1][1] == layout.size


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
