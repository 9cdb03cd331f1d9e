"""How much memory a Fleet takes on a rank.

``shm``'s segment and all of ``nvlink`` are sized by the functions that the transports themselves use; received buffers
and those for the way home by formulas that tests hold against what is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..config import EpLayout, FleetParams
from ..knobs import FleetAlgoKnob, FleetAlgoKnobFaultTolerance, RowFormat
from ..placement import Placement
from ..substrate.control import SETS
from ..transports.nvlink.geometry import memory_bytes
from ..transports.shm.layout import SegmentLayout


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        at_start: taken when the Fleet is built.
        at_most: taken if every buffer fills up; pages that no row reaches are never touched, on a CPU.
    """

    at_start: int
    at_most: int


def inbox_bytes(params: FleetParams, world_size: int, num_local: int, *, rows: bool = True) -> int:
    """One received buffer of ``shm`` and ``torch_dist``: rows, scales, and in all but EXPERT_MAJOR the routing."""
    places = math.prod(params.received_shape(world_size, num_local))
    row = (params.token_hidden_size * params.dtype_bytes if rows else 0) + params.scale_bytes_per_token
    routing = 0 if params.layout is EpLayout.EXPERT_MAJOR else 12 * params.max_topk  # int64 ids, float32 weights
    return places * (row + routing)


def shm(params: FleetParams, world_size: int, rank: int = 0, algo_knobs: Sequence[FleetAlgoKnob] = ()) -> Memory:
    """The shared segment, of which EXPERT_MAJOR takes a part only as rows arrive, and what is received beside rows.

    With the compiled helper; without it EXPERT_MAJOR takes less. While a rank is masked, rows come into other memory.
    """
    params = replace(params, scale_bytes_per_token=RowFormat.of(params, algo_knobs).scale_bytes)
    segment = SegmentLayout.of(params, world_size, _local(params, world_size, 0))
    held, tolerant = (
        _local(params, world_size, rank),
        any(isinstance(k, FleetAlgoKnobFaultTolerance) for k in algo_knobs),
    )
    beside = SETS * inbox_bytes(params, world_size, held, rows=False)
    masked = SETS * inbox_bytes(params, world_size, held) if tolerant else 0
    return Memory(segment.allocated, segment.size + beside + masked)


def torch_dist(params: FleetParams, world_size: int, rank: int = 0, algo_knobs: Sequence[FleetAlgoKnob] = ()) -> Memory:
    """The received buffers and those for the way home. What is in flight in a collective comes on top."""
    form = RowFormat.of(params, algo_knobs)
    carried = replace(params, dtype_bytes=form.there_bytes, scale_bytes_per_token=form.scale_bytes)
    inboxes = SETS * inbox_bytes(carried, world_size, _local(params, world_size, rank))
    home = params.recv_capacity(world_size) * form.returned_bytes
    return Memory(0, inboxes + SETS * home)


def nvlink(params: FleetParams, world_size: int, rank: int = 0, algo_knobs: Sequence[FleetAlgoKnob] = ()) -> Memory:
    """GPU memory, all of it taken at construction."""
    total = memory_bytes(params, world_size, rank, algo_knobs)["total"]
    return Memory(total, total)


FORMULAS: dict[str, Callable[[FleetParams, int, int, Sequence[FleetAlgoKnob]], Memory]] = {
    "nvlink": nvlink,
    "shm": shm,
    "torch_dist": torch_dist,
}
"""By transport: (params, world_size, rank, algo_knobs) -> :class:`Memory`. Other transports do not say."""


def fleet_memory(
    transport: str,
    params: FleetParams,
    world_size: int,
    device_type: str = "cpu",
    algo_knobs: Sequence[FleetAlgoKnob] = (),
) -> Memory | None:
    """On the rank that holds most experts; ``None`` for a transport that does not say.

    A GPU has no pages that wait to be touched: there, everything is taken as soon as steps run.
    """
    if (formula := FORMULAS.get(transport)) is None:
        return None
    found = formula(params, world_size, 0, algo_knobs)
    return Memory(found.at_most, found.at_most) if device_type == "cuda" else found


def _local(params: FleetParams, world_size: int, rank: int) -> int:
    return Placement.contiguous(params.num_experts, world_size).num_local(rank)
