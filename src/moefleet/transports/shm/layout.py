"""Where everything lies in a rank's segment: one formula, equal on all ranks."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

from ...config import EpLayout, FleetParams
from ...substrate.control import BLOCK_BYTES, HEADER_BYTES, SETS, Operation

_PHASES = (Operation.DISPATCH, Operation.COMBINE)


@dataclass(frozen=True)
class SegmentLayout:
    """Byte offsets in a segment.

    A segment is: control block; one header for each phase and set, and one for a failure in each set; then for each
    set int32 ids ``[M, Kmax]``, float32 weights ``[M, Kmax]``, int64 offsets ``[2, W]`` (where each source's rows begin
    among the combined ones, and how many), scales ``[M, S]`` bytes, token rows ``[M, H]``, combined rows ``[C, H]``.
    ``C`` is ``M*W``, or max_recv_tokens_per_rank.

    Where rows are placed, int32 ``[E + W]`` says how many rows are bound for each expert, and how many tokens for each
    rank, and two areas in the shape of received rows follow for each set, on pages of their own: experts'
    rows (EXPERT_MAJOR only; elsewhere the combined rows serve) and received rows. The latter alone are written by
    peers. In EXPERT_MAJOR these are large and mostly empty, and their pages are taken as rows come.

    Attributes:
        size: bytes of the whole.
        allocated: bytes from the front that are taken at construction.
        open_from: where what peers write begins.
        row_bytes, scale_bytes: of one token.
        ids, weights, offsets, bound, scales, tokens, combined: offset for each set.
        made, landing: of experts' and of received rows; empty where rows are not placed.
    """

    size: int
    allocated: int
    open_from: int
    row_bytes: int
    scale_bytes: int
    ids: tuple[int, ...]
    weights: tuple[int, ...]
    offsets: tuple[int, ...]
    bound: tuple[int, ...]
    scales: tuple[int, ...]
    tokens: tuple[int, ...]
    combined: tuple[int, ...]
    made: tuple[int, ...] = ()
    landing: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: FleetParams, world_size: int, most_local: int | None = None) -> SegmentLayout:
        """The layout, for ranks of at most ``most_local`` experts; ``None``: no rows are placed."""
        most, row = params.max_tokens_per_rank, params.token_hidden_size * params.dtype_bytes
        slots = most * params.max_topk * 4
        combined = params.recv_capacity(world_size)
        at = BLOCK_BYTES + (len(_PHASES) + 1) * SETS * HEADER_BYTES
        bound = 0 if most_local is None else 4 * (params.num_experts + world_size)
        names = ("ids", "weights", "offsets", "bound", "scales", "tokens", "combined")
        places: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(SETS):
            for name, size, unit in (
                ("ids", slots, 64),
                ("weights", slots, 64),
                ("offsets", 16 * world_size, 64),
                ("bound", bound, 64),
                ("scales", most * params.scale_bytes_per_token, max(1, params.scale_bytes_per_token)),
                ("tokens", most * row, row),
                ("combined", combined * row, row),
            ):
                at = -(-at // unit) * unit
                places[name].append(at)
                at += size
        allocated = open_from = at
        if most_local is not None:
            expert_major = params.layout is EpLayout.EXPERT_MAJOR
            area = _pages(math.prod(params.received_shape(world_size, most_local)) * row)
            at = _pages(at)
            for name in ("made", "landing") if expert_major else ("landing",):
                open_from = at
                places[name] = [at + s * area for s in range(SETS)]
                at += SETS * area
            if not expert_major:
                allocated = at
        offsets = {name: tuple(where) for name, where in places.items()}
        return cls(at, allocated, open_from, row, params.scale_bytes_per_token, **offsets)

    @property
    def align(self) -> int:
        """What the distance between segments divides by, so that rows of all ranks form one table."""
        return math.lcm(self.row_bytes, max(1, self.scale_bytes))

    @staticmethod
    def header(operation: Operation, step: int) -> int:
        """Offset of this phase's header for this step."""
        return BLOCK_BYTES + ((operation - 1) * SETS + step % SETS) * HEADER_BYTES

    @staticmethod
    def failure(step: int) -> int:
        """Offset of the header that says why a rank gave this step up.

        It has a place of its own, as a rank that fails steps on its own does not wait until the peers have read what
        it committed for the steps before, which went well.
        """
        return BLOCK_BYTES + (len(_PHASES) * SETS + step % SETS) * HEADER_BYTES


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
