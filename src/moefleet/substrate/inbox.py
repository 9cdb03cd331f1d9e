"""Private memory that one buffer set's received rows are gathered into, and the DispatchOutput that shows it."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..config import EpLayout, FleetParams
from ..tensors import DispatchOutput
from .gather import gather_blocks
from .routes import Arrivals, ExpertBlocks, expert_blocks


class Inbox:
    """Sized once from ``params``; pages are touched only where rows arrive."""

    def __init__(self, params: FleetParams, world_size: int, num_local: int) -> None:
        self._params, self._num_local = params, num_local
        self._layout = params.resolved_layout
        self._shape = params.received_shape(world_size, num_local)
        self._places = math.prod(self._shape)
        self._rows = torch.empty(self._places * params.token_hidden_size * params.dtype_bytes, dtype=torch.uint8)
        self._scales = torch.empty(self._places * params.scale_bytes_per_token, dtype=torch.uint8)
        units = {EpLayout.EXPERT_MAJOR: num_local, EpLayout.RANK_MAJOR: world_size, EpLayout.FLAT: 1}[self._layout]
        self._counts = torch.zeros(units, dtype=torch.int32)
        self._routing: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stale: np.ndarray | slice = slice(0, 0)

    def output(self, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None) -> DispatchOutput:
        """Views of this memory in the Fleet's layout; :meth:`fill` writes them."""
        rows = self._rows.view(dtype).view(*self._shape, -1)
        scales = None if scale_dtype is None else self._scales.view(scale_dtype).view(*self._shape, -1)
        if self._layout is EpLayout.EXPERT_MAJOR:
            return DispatchOutput(rows, expert_counts=self._counts, expert_scales=scales)
        if self._routing is None or self._routing[0].shape[1] != topk:
            self._routing = (
                torch.full((self._places, topk), -1, dtype=torch.int64),
                torch.zeros(self._places, topk, dtype=torch.float32),
            )
        ids, weights = (part.view(*self._shape, topk) for part in self._routing)
        if self._layout is EpLayout.RANK_MAJOR:
            return DispatchOutput(rows, ids, weights, expert_counts=self._counts, expert_scales=scales)
        return DispatchOutput(rows, ids, weights, recv_total_counter=self._counts, expert_scales=scales)

    def fill(
        self, got: Arrivals, table: torch.Tensor, scale_table: torch.Tensor | None, scale_shift: np.ndarray | None
    ) -> ExpertBlocks | None:
        """Gather the rows that arrived. Returns how they are sorted, in EXPERT_MAJOR.

        Args:
            got: which rows.
            table: ``[many, H]`` that ``got.rows`` indexes.
            scale_table: bytes ``[many, S]``, and ``scale_shift`` ``[N]``, the index of each row in it.
        """
        blocks = None
        rows, scale_rows = got.rows, scale_shift
        if self._layout is EpLayout.EXPERT_MAJOR:
            capacity = self._shape[1]
            blocks = expert_blocks(got.local, got.weights, self._num_local, capacity)
            rows = got.rows[blocks.row]
            scale_rows = None if scale_rows is None else scale_rows[blocks.row]
            counts = blocks.counts
            starts = list(range(0, self._num_local * capacity, capacity))
        elif self._layout is EpLayout.RANK_MAJOR:
            counts = np.diff(got.bounds)
            starts = list(range(0, self._places, self._params.max_tokens_per_rank))
            first = np.repeat(np.asarray(starts) - got.bounds[:-1], counts)
            self._route(np.arange(len(rows)) + first, got)
        else:
            counts, starts = np.array([len(rows)]), [0]
            self._route(slice(0, len(rows)), got)
        self._counts.numpy()[:] = counts
        bounds = [0, *np.cumsum(counts).tolist()]
        gather_blocks(table, rows, self._rows.view(table.dtype).view(self._places, -1), bounds, starts)
        if scale_table is not None and scale_rows is not None:
            gather_blocks(scale_table, scale_rows, self._scales.view(self._places, -1), bounds, starts)
        return blocks

    def _route(self, places: np.ndarray | slice, got: Arrivals) -> None:
        assert self._routing is not None, "output() comes before fill()"
        ids, weights = (part.numpy() for part in self._routing)
        ids[self._stale], weights[self._stale] = -1, 0
        ids[places], weights[places] = got.local, got.weights
        self._stale = places
