"""Memory that a step's received rows are gathered into (or placed), and the DispatchOutput that shows it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ..config import EpLayout, FleetParams
from ..tensors import DispatchOutput
from .device_gather import movements
from .memory import prefer_huge_pages
from .routes import Arrivals, ExpertBlocks, Ints, count_to, expert_blocks


class Inbox:
    """Sized once from ``params``; pages are touched only where rows arrive.

    Args:
        rows: memory to use for the rows, bytes; ``None`` takes private memory.

    Attributes:
        shown: what :meth:`output` returned last.
    """

    def __init__(
        self,
        params: FleetParams,
        world_size: int,
        num_local: int,
        device: torch.device | str = "cpu",
        rows: torch.Tensor | None = None,
    ) -> None:
        self._params, self._num_local = params, num_local
        self._layout = params.resolved_layout
        self._shape = params.received_shape(world_size, num_local)
        self._places = math.prod(self._shape)
        row_bytes = params.token_hidden_size * params.dtype_bytes
        if rows is None:
            rows = torch.empty(self._places * row_bytes, dtype=torch.uint8, device=device)
            if rows.device.type == "cpu":
                prefer_huge_pages(rows)
        self._rows = rows
        self._scales = torch.empty(self._places * params.scale_bytes_per_token, dtype=torch.uint8, device=device)
        self._gather_blocks = movements(device).gather_blocks
        blocks = 1 if self._layout is EpLayout.FLAT else self._shape[0]
        self._starts = np.arange(blocks) * self._shape[-1]
        self._counts = torch.zeros(blocks, dtype=torch.int32)
        self._counts_host = self._counts.numpy()
        self._flat_rows: torch.Tensor | None = None
        self._key: tuple[torch.dtype | None, int, torch.dtype | None] = (None, 0, None)
        self._routing: tuple[torch.Tensor, torch.Tensor] | None = None
        self._routing_host: tuple[Ints, npt.NDArray[np.float32]] | None = None
        self._stale: Ints | slice = slice(0, 0)
        self.shown: DispatchOutput | None = None

    def output(self, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None) -> DispatchOutput:
        """Views of this memory in the Fleet's layout; :meth:`fill` writes them."""
        key = (dtype, topk, scale_dtype)
        if self.shown is None or key != self._key:
            with torch.inference_mode(False):  # what lasts can be written in any mode
                self._key, self.shown = key, self._make(*key)
        return self.shown

    def _make(self, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None) -> DispatchOutput:
        rows = self._rows.view(dtype).view(*self._shape, self._params.token_hidden_size)
        scales = None
        if scale_dtype is not None:
            width = self._params.scale_bytes_per_token // scale_dtype.itemsize
            scales = self._scales.view(scale_dtype).view(*self._shape, width)
        if self._layout is EpLayout.EXPERT_MAJOR:
            return DispatchOutput(rows, expert_counts=self._counts, expert_scales=scales)
        if self._routing is None or self._routing[0].shape[1] != topk:
            ids = torch.full((self._places, topk), -1, dtype=torch.int64)
            self._routing = ids, torch.zeros(self._places, topk, dtype=torch.float32)
            self._routing_host = self._routing[0].numpy(), self._routing[1].numpy()
        ids, weights = (part.view(*self._shape, topk) for part in self._routing)
        if self._layout is EpLayout.RANK_MAJOR:
            return DispatchOutput(rows, ids, weights, expert_counts=self._counts, expert_scales=scales)
        return DispatchOutput(rows, ids, weights, recv_total_counter=self._counts, expert_scales=scales)

    def fill(
        self, got: Arrivals, table: torch.Tensor, rows: Ints, scales: tuple[torch.Tensor, Ints] | None = None
    ) -> ExpertBlocks | None:
        """Gather the rows that arrived. Returns how they are sorted, in EXPERT_MAJOR.

        Args:
            got: which rows.
            table, rows: ``[many, H]``, and ``[N]`` where each arrival lies in it.
            scales: the same for scales: bytes ``[many, S]``, and ``[N]``.
        """
        blocks, places = None, None
        if self._layout is EpLayout.EXPERT_MAJOR:
            blocks = expert_blocks(got.local, got.weights, self._num_local, self._shape[1])
            rows, counts, places = rows[blocks.row], blocks.counts, blocks.position
        elif self._layout is EpLayout.RANK_MAJOR:
            counts = got.counts
            places = count_to(len(rows)) + (self._starts - got.bounds[:-1]).repeat(counts)
            self._route(places, got)
        else:
            counts = np.array([len(rows)])
            self._route(slice(0, len(rows)), got)
        self._counts_host[:] = counts
        self._gather_blocks(table, rows, self._flat(table), counts.tolist(), self._starts.tolist(), places)
        if scales is not None:
            scale_table, scale_rows = scales
            scale_rows = scale_rows if blocks is None else scale_rows[blocks.row]
            out = self._scales.view(self._places, scale_table.shape[1])
            self._gather_blocks(scale_table, scale_rows, out, counts.tolist(), self._starts.tolist(), places)
        return blocks

    def _flat(self, table: torch.Tensor) -> torch.Tensor:
        """The received rows ``[places, H]`` in the table's type."""
        if self._flat_rows is None or self._flat_rows.dtype != table.dtype:
            with torch.inference_mode(False):
                self._flat_rows = self._rows.view(table.dtype).view(self._places, table.shape[1])
        return self._flat_rows

    def _route(self, places: Ints | slice, got: Arrivals) -> None:
        assert self._routing_host is not None, "output() comes before fill()"
        ids, weights = self._routing_host
        ids[self._stale], weights[self._stale] = -1, 0
        ids[places], weights[places] = got.local, np.where(got.local >= 0, got.weights, np.float32(0))
        self._stale = places


class DeviceInbox(Inbox):
    """The same on a GPU: counts and routing are made on the host, and copied over once they are complete."""

    def __init__(self, params: FleetParams, world_size: int, num_local: int, device: torch.device) -> None:
        super().__init__(params, world_size, num_local, device)
        self._used = 0  # places that held routing after the last fill
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # what the host makes, and where it is shown

    def _make(self, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None) -> DispatchOutput:
        made = super()._make(dtype, topk, scale_dtype)
        shown = {}
        self._copies = []
        for name in ("expert_counts", "recv_total_counter", "recv_topk_idx", "recv_topk_weights"):
            if (host := getattr(made, name)) is not None:
                shown[name] = host.to(self._rows.device)
                self._copies.append((host, shown[name]))
        return replace(made, **shown)

    def fill(
        self, got: Arrivals, table: torch.Tensor, rows: Ints, scales: tuple[torch.Tensor, Ints] | None = None
    ) -> ExpertBlocks | None:
        blocks = super().fill(got, table, rows, scales)
        # FLAT alone is large, and filled from the front.
        used = len(got.token) if self._layout is EpLayout.FLAT else self._places
        most, self._used = max(used, self._used, 1), used
        for host, shown in self._copies:  # by way of pinned memory, or the host would wait for the stream
            shown[:most].copy_(host[:most].pin_memory(), non_blocking=True)
        return blocks
