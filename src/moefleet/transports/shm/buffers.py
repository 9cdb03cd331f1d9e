"""The two alternating buffer sets: every rank's memory as the views that a step needs, made once."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...config import FleetParams
from ...substrate.control import SETS
from ...substrate.group import HostGroup
from ...substrate.inbox import Inbox
from ...substrate.routes import Ints
from ...substrate.rowtypes import DTYPES
from .layout import SegmentLayout


@dataclass(frozen=True)
class BufferSet:
    """Memory of the steps of one parity. Lists have an entry for each rank; peers' entries are read only.

    Attributes:
        ids, weights: flat int32 and float32 ``[M * Kmax]``.
        offsets: int64 ``[2, W]``, where each source's rows begin among those that the rank combined, and how many.
        token_rows, combined_rows: ``[W]`` table row at which the rank's tokens and combined rows begin.
        scale_rows: ``[W]`` the same for its scales, in the table of scales.
        tokens, combined: this rank's own memory, ``[M, H]`` and ``[C, H]`` for each row type.
        scales: this rank's own memory, bytes ``[M, S]``.
    """

    ids: list[npt.NDArray[np.int32]]
    weights: list[npt.NDArray[np.float32]]
    offsets: list[Ints]
    token_rows: Ints
    combined_rows: Ints
    scale_rows: Ints | None
    tokens: dict[torch.dtype, torch.Tensor]
    combined: dict[torch.dtype, torch.Tensor]
    scales: torch.Tensor | None


@dataclass(frozen=True)
class Buffers:
    """All of a Fleet's memory.

    Attributes:
        tables: all ranks' memory as rows ``[many, H]``, for each row type.
        scale_table: the same as scale rows, bytes ``[many, S]``; ``None`` without scales.
        sets: step ``s`` uses ``sets[s % 2]``.
        inboxes: private memory to receive into, the last used first. They are not tied to a set: a rank whose steps
            do not overlap uses one alone, which stays in its caches.
    """

    tables: dict[torch.dtype, torch.Tensor]
    scale_table: torch.Tensor | None
    sets: tuple[BufferSet, ...]
    inboxes: list[tuple[int, Inbox]]

    def inbox(self, step: int, open_steps: Container[int]) -> Inbox:
        """The inbox that step ``step`` receives into: the last used of those that no open step needs."""
        free = next(i for i, (user, _) in enumerate(self.inboxes) if user not in open_steps)
        _, inbox = self.inboxes.pop(free)
        self.inboxes.insert(0, (step, inbox))
        return inbox

    @classmethod
    def over(cls, group: HostGroup, layout: SegmentLayout, params: FleetParams, num_local: int) -> Buffers:
        """Views over the group's segments."""
        world, most = group.world_size, params.max_tokens_per_rank
        tables = {t: group.range.rows(t, params.token_hidden_size) for t in DTYPES[params.dtype_bytes]}
        scale_table = group.range.rows(torch.uint8, layout.scale_bytes) if layout.scale_bytes else None

        def flat(offset: int, dtype: Any, count: int) -> list[npt.NDArray[Any]]:
            return [np.frombuffer(group.memory, dtype, count, r * group.range.stride + offset) for r in range(world)]

        def first_rows(offset: int, row_bytes: int) -> Ints:
            return np.array([(r * group.range.stride + offset) // row_bytes for r in range(world)])

        def own(table: torch.Tensor, firsts: Ints, count: int) -> torch.Tensor:
            first = int(firsts[group.rank])
            return table[first : first + count]

        sets = []
        for s in range(SETS):
            token_rows = first_rows(layout.tokens[s], layout.row_bytes)
            combined_rows = first_rows(layout.combined[s], layout.row_bytes)
            scale_rows = None if scale_table is None else first_rows(layout.scales[s], layout.scale_bytes)
            sets.append(
                BufferSet(
                    ids=flat(layout.ids[s], np.int32, most * params.max_topk),
                    weights=flat(layout.weights[s], np.float32, most * params.max_topk),
                    offsets=[part.reshape(2, world) for part in flat(layout.offsets[s], np.int64, 2 * world)],
                    token_rows=token_rows,
                    combined_rows=combined_rows,
                    scale_rows=scale_rows,
                    tokens={t: own(table, token_rows, most) for t, table in tables.items()},
                    combined={t: own(table, combined_rows, params.recv_capacity(world)) for t, table in tables.items()},
                    scales=None if scale_table is None or scale_rows is None else own(scale_table, scale_rows, most),
                )
            )
        inboxes = [(0, Inbox(params, world, num_local)) for _ in range(SETS)]
        return cls(tables, scale_table, tuple(sets), inboxes)
