"""The two alternating buffer sets: every rank's memory as the views that a step needs, made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...config import EpLayout, FleetParams
from ...substrate.control import SETS
from ...substrate.group import HostGroup
from ...substrate.inbox import Inbox
from ...substrate.routes import Ints
from ...substrate.rowtypes import DTYPES
from .layout import SegmentLayout

I = TypeVar("I", bound=Inbox)  # noqa: E741 - a kind of inbox


@dataclass(frozen=True)
class BufferSet:
    """Memory of the steps of one parity. Peers' parts are read only.

    Ids past those of the present step are -1, so that ranks with different numbers of tokens can be read as one grid.

    Attributes:
        parity: of these steps.
        ids, weights: flat int32 and float32 ``[M * Kmax]`` of this rank.
        all_ids, all_weights: the same of all ranks, as rows of ``[W, M * Kmax]``.
        offsets: int64 ``[2, W]`` of this rank: where each source's rows begin among those that it combined, and how
            many.
        my_offsets: int64 ``[W, 2]``: the entries of all ranks' offsets that are about this rank.
        token_rows, combined_rows: ``[W]`` table row at which the rank's tokens and combined rows begin.
        scale_rows: ``[W]`` the same for its scales, in the table of scales.
        tokens, combined: this rank's own memory, ``[M, H]`` and ``[C, H]`` for each row type.
        returned: memory of this rank's in the shape of received rows, for what experts make of them: ``combined``;
            ``None`` in EXPERT_MAJOR, where that holds sums of them.
        scales: this rank's own memory, bytes ``[M, S]``.
    """

    parity: int
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    all_ids: npt.NDArray[np.int32]
    all_weights: npt.NDArray[np.float32]
    offsets: Ints
    my_offsets: Ints
    token_rows: Ints
    combined_rows: Ints
    scale_rows: Ints | None
    tokens: dict[torch.dtype, torch.Tensor]
    combined: dict[torch.dtype, torch.Tensor]
    returned: dict[torch.dtype, torch.Tensor] | None
    scales: torch.Tensor | None


@dataclass(frozen=True)
class Buffers(Generic[I]):
    """All of a Fleet's memory.

    Attributes:
        tables: all ranks' memory as rows ``[many, H]``, for each row type.
        scale_table: the same as scale rows, bytes ``[many, S]``; ``None`` without scales.
        sets: step ``s`` uses ``sets[s % 2]``.
        inboxes: private memory to receive into, the last used first. They are not tied to a set: a rank whose steps
            do not overlap uses one alone, which stays in its caches.
        landings: the same for each set in memory that peers place rows in; empty where they do not.
        made: in EXPERT_MAJOR, where rows are placed, two memories in the shape of received rows for what experts make
            of them, by row type: a step uses that of the step before, which caches may hold, or where a peer may
            still read it the other, see :meth:`Moves.making`.
    """

    tables: dict[torch.dtype, torch.Tensor]
    scale_table: torch.Tensor | None
    sets: tuple[BufferSet, ...]
    inboxes: list[tuple[int, I]]
    landings: tuple[I, ...]
    made: tuple[dict[torch.dtype, torch.Tensor], ...]

    def inbox(self, step: int, open_steps: Container[int]) -> I:
        """The inbox that step ``step`` receives into: the last used of those that no open step needs."""
        user, inbox = self.inboxes[0]
        if user in open_steps:
            free = next(i for i, (user, _) in enumerate(self.inboxes) if user not in open_steps)
            self.inboxes[0], self.inboxes[free] = self.inboxes[free], self.inboxes[0]
            _, inbox = self.inboxes[0]
        self.inboxes[0] = step, inbox
        return inbox

    @classmethod
    def over(
        cls,
        group: HostGroup,
        layout: SegmentLayout,
        params: FleetParams,
        num_local: int,
        inbox: Callable[..., I],
    ) -> Buffers[I]:
        """Views over the group's segments, and memory to receive into of the kind ``inbox``."""
        world, most = group.world_size, params.max_tokens_per_rank
        tables = {t: group.range.rows(t, params.token_hidden_size) for t in DTYPES[params.dtype_bytes]}
        scale_table = group.range.rows(torch.uint8, layout.scale_bytes) if layout.scale_bytes else None

        def everybodys(offset: int, dtype: Any, count: int) -> npt.NDArray[Any]:
            strides = (group.range.stride, np.dtype(dtype).itemsize)
            return np.ndarray((world, count), dtype, group.memory, offset, strides)

        def first_rows(offset: int, row_bytes: int) -> Ints:
            return np.array([(r * group.range.stride + offset) // row_bytes for r in range(world)])

        def own(table: torch.Tensor, firsts: Ints, count: int) -> torch.Tensor:
            first = int(firsts[group.rank])
            return table[first : first + count]

        shape = *params.received_shape(world, num_local), params.token_hidden_size
        area_bytes = math.prod(shape) * params.dtype_bytes

        def area(offset: int) -> torch.Tensor:
            at = group.rank * group.range.stride + offset
            if not area_bytes:
                return torch.empty(0, dtype=torch.uint8)
            return torch.frombuffer(group.range.buffer, dtype=torch.uint8, count=area_bytes, offset=at)

        sets = []
        for s in range(SETS):
            token_rows = first_rows(layout.tokens[s], layout.row_bytes)
            combined_rows = first_rows(layout.combined[s], layout.row_bytes)
            scale_rows = None if scale_table is None else first_rows(layout.scales[s], layout.scale_bytes)
            all_ids = everybodys(layout.ids[s], np.int32, most * params.max_topk)
            all_weights = everybodys(layout.weights[s], np.float32, most * params.max_topk)
            all_offsets = everybodys(layout.offsets[s], np.int64, 2 * world)
            all_ids[group.rank] = -1
            offsets = all_offsets[group.rank].reshape(2, world)
            if params.layout is EpLayout.RANK_MAJOR:
                offsets[0] = np.arange(world) * most
            combined = {t: own(table, combined_rows, params.recv_capacity(world)) for t, table in tables.items()}
            returned = None
            if params.layout is not EpLayout.EXPERT_MAJOR:
                returned = {t: rows.view(shape) for t, rows in combined.items()}
            sets.append(
                BufferSet(
                    parity=s,
                    ids=all_ids[group.rank],
                    weights=all_weights[group.rank],
                    all_ids=all_ids,
                    all_weights=all_weights,
                    offsets=offsets,
                    my_offsets=all_offsets[:, group.rank :: world],
                    token_rows=token_rows,
                    combined_rows=combined_rows,
                    scale_rows=scale_rows,
                    tokens={t: own(table, token_rows, most) for t, table in tables.items()},
                    combined=combined,
                    returned=returned,
                    scales=None if scale_table is None or scale_rows is None else own(scale_table, scale_rows, most),
                )
            )
        inboxes = [(0, inbox(params, world, num_local)) for _ in range(SETS)]
        landings = tuple(inbox(params, world, num_local, rows=area(offset)) for offset in layout.landing)
        made = tuple({t: area(offset).view(t).view(shape) for t in tables} for offset in layout.made)
        return cls(tables, scale_table, tuple(sets), inboxes, landings, made)
