"""Which ``max_tokens_per_rank`` to build a Fleet with, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import EpAlgorithm, EpLayout, FleetParams
from .shape import ModelShape
from .words import in_bytes, in_rows

DECODE_TOKENS = 128
"""Sequences that a rank decodes at once, at most, unless memory says less."""

PREFILL_TOKENS = (512, 8192)
"""Bounds of what is proposed for prefill."""

FULL_TILE = 128
"""Rows of an expert that fill a tile of its matrix product: beyond it, more rows no longer make a row cheaper."""

SHARE = 0.1
"""Part of the memory that the weights leave which a Fleet may take; the rest is for the cache and activations."""


@dataclass(frozen=True)
class Advice:
    """A proposal for ``max_tokens_per_rank``.

    Attributes:
        purpose: ``"decode"`` or ``"prefill"``.
        layout: of the Fleet.
        tokens: ``M``.
        reason: one or two sentences.
    """

    purpose: str
    layout: EpLayout
    tokens: int
    reason: str


def fleet_params(shape: ModelShape, tokens: int, layout: EpLayout) -> FleetParams:
    """The parameters of a Fleet for this model."""
    flat = layout is EpLayout.FLAT
    return FleetParams(
        num_experts=shape.experts,
        max_tokens_per_rank=tokens,
        token_hidden_size=shape.hidden,
        dtype_bytes=shape.dtype_bytes,
        algorithm=EpAlgorithm.HIGH_THROUGHPUT if flat else EpAlgorithm.LOW_LATENCY,
        layout=layout,
        max_topk=shape.topk,
    )


def advise(
    shape: ModelShape,
    world_size: int,
    layout: EpLayout,
    takes: Callable[[FleetParams], tuple[int, str]],
    room: int | None,
) -> Advice:
    """Propose ``M``: for decode where the layout is LOW_LATENCY, else for prefill.

    Args:
        takes: bytes that a Fleet of given parameters takes on a rank, and by which transport.
        room: bytes that the weights leave on a rank; ``None`` if unknown.
    """
    rows_of = world_size * shape.topk / shape.experts  # rows of an expert for each token of a rank
    if layout is EpLayout.FLAT:
        least, most = PREFILL_TOKENS
        wanted = least
        while wanted < most and wanted * rows_of < FULL_TILE:
            wanted *= 2
        purpose, why = "prefill", f"a chunk of prompts on each rank; {FULL_TILE} rows of an expert fill a tile"
    else:
        wanted = DECODE_TOKENS
        purpose, why = "decode", f"up to {wanted} sequences decode at once on each rank"
    tokens = wanted
    allowed = None if room is None or room <= 0 else int(room * SHARE)
    while allowed is not None and tokens > 1 and takes(fleet_params(shape, tokens, layout))[0] > allowed:
        tokens //= 2
    used, transport = takes(fleet_params(shape, tokens, layout))
    reason = f"{why}. An expert gets {in_rows(tokens * rows_of)} rows on average; "
    reason += f"the Fleet takes {in_bytes(used)} on a rank ({transport})"
    if room is None:
        reason += ". How much memory there is, is unknown."
    elif allowed is None:
        reason += ". The weights leave no memory, so it does not bound this."
    elif tokens < wanted:
        reason += f": halved from {wanted} to stay within {SHARE:.0%} of the memory that weights leave."
    else:
        reason += f", within {SHARE:.0%} of the memory that weights leave."
    return Advice(purpose, layout, tokens, reason)
