"""What crosses between ranks in a step, as expected when routers choose uniformly.

A token names ``K`` distinct experts out of ``E``, any of them alike. A rank with ``L`` experts is named by it with

    p = 1 - C(E - L, K) / C(E, K)

which for many experts tends to ``1 - (1 - 1/W)^K``. In our own transports a token crosses to a rank once, whatever the
layout, and comes back once, so ``M`` tokens of a rank send ``M * p`` rows to each other rank:

    dispatch: M * (W-1) * p * (H * dtype_bytes + scale_bytes + 8 * K)     the routing: int32 ids, float32 weights
    combine:  M * (W-1) * p *  H * dtype_bytes

With FleetAlgoKnobQuantization an element takes 1 byte in dispatch, and each 128 of a row 4 bytes of scale; a caller's
own fp8 rows take 1 byte there and 2 back.

Where ranks hold different numbers of experts, ``p`` is the mean over ranks. Layouts differ in what the experts then
find: EXPERT_MAJOR one row per (token, expert), ``M * W * K`` over all ranks; the others one per token that came.
Libraries that send a row to each chosen expert send ``M * K * (1 - 1/W)`` rows instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import EpLayout, FleetParams
from ..knobs import FleetAlgoKnob, RowFormat
from ..placement import Placement

ROUTING_BYTES = 8
"""Of one slot: an int32 id and a float32 weight."""


@dataclass(frozen=True)
class Traffic:
    """One step of one MoE layer, mean over ranks. Rows are expectations, so they are no whole numbers.

    Attributes:
        rows_to_each: rows that a rank sends to one other rank in dispatch, and gets back in combine.
        rows: the same to all other ranks.
        dispatch_bytes, combine_bytes: of those rows; routing travels in dispatch.
        received_rows: rows of ``expert_tensors`` that hold something, a rank's own tokens included.
        rows_per_expert: (token, expert) pairs of one expert.
        times_fewer: rows of a library that sends one to each chosen expert, divided by ``rows``; 1 if nothing crosses.
    """

    rows_to_each: float
    rows: float
    dispatch_bytes: int
    combine_bytes: int
    received_rows: float
    rows_per_expert: float
    times_fewer: float


def reach(experts: int, local: int, topk: int) -> float:
    """How likely a token that names ``topk`` of ``experts`` names one of ``local``."""
    return 1 - math.comb(experts - local, topk) / math.comb(experts, topk)


def traffic(params: FleetParams, world_size: int, topk: int, algo_knobs: Sequence[FleetAlgoKnob] = ()) -> Traffic:
    """Expected rows and bytes when every rank brings ``max_tokens_per_rank`` tokens."""
    most, experts, world = params.max_tokens_per_rank, params.num_experts, world_size
    held = Placement.contiguous(experts, world).slots_per_rank
    named = sum(reach(experts, local, topk) for local in held) / world
    rows = most * (world - 1) * named
    form = RowFormat.of(params, algo_knobs)
    pairs = most * topk  # of a rank's experts, mean over ranks
    return Traffic(
        rows_to_each=most * named if world > 1 else 0.0,
        rows=rows,
        dispatch_bytes=round(rows * (form.sent_bytes + ROUTING_BYTES * topk)),
        combine_bytes=round(rows * form.returned_bytes),
        received_rows=pairs if params.layout is EpLayout.EXPERT_MAJOR else most * world * named,
        rows_per_expert=most * world * topk / experts,
        times_fewer=most * topk * (1 - 1 / world) / rows if rows else 1.0,
    )
