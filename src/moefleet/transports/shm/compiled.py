"""The movements in C: each is one call of the helper in ``moefleet.native``, with all addresses known beforehand."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...config import EpLayout, FleetParams
from ...native import FleetStruct, InboxStruct
from ...placement import Placement
from ...substrate.control import MAX_RANKS
from ...substrate.inbox import Inbox
from ...substrate.memory import AddressRange
from ...substrate.native_gather import STREAM_BYTES, TYPE_CODES, dense, ties_go_away
from ...substrate.routes import Ints
from ...tensors import DispatchOutput
from .buffers import BufferSet
from .layout import SegmentLayout
from .moves import Moves, Routing
from .quick import Tokens

_LAYOUTS = {EpLayout.EXPERT_MAJOR: 0, EpLayout.RANK_MAJOR: 1, EpLayout.FLAT: 2}


class NativeInbox(Inbox):
    """Memory to receive into, and what :meth:`NativeMoves.arrive` finds out about the rows, as C sees it."""

    def __init__(self, params: FleetParams, world_size: int, num_local: int) -> None:
        super().__init__(params, world_size, num_local)
        rows = params.max_tokens_per_rank * world_size
        entries = rows * min(params.max_topk, num_local) if self._layout is EpLayout.EXPERT_MAJOR else 0
        self._arrays: dict[str, npt.NDArray[Any]] = {  # pages are touched only where rows arrive
            "shown": np.zeros(world_size, np.int64),
            "bounds": np.zeros(world_size + 1, np.int64),
            "token": np.empty(rows, np.int32),
            "bag": np.empty(rows + 1 if entries else 1, np.int64),
            "position": np.empty(entries, np.int64),
            "weight": np.empty(entries, np.float32),
            "expert_rows": np.zeros(num_local, np.int64),
            "local": np.empty(params.max_topk, np.int64),
            "expert": np.empty(params.max_topk, np.int64),
            "sum": np.empty(params.max_topk, np.float64),
        }
        self.struct = InboxStruct(
            rows=self._rows.data_ptr(),
            scales=self._scales.data_ptr(),
            counts=self._counts.data_ptr(),
            total=0,
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self.address = ctypes.addressof(self.struct)

    def _make(self, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None) -> DispatchOutput:
        before = self._routing
        made = super()._make(dtype, topk, scale_dtype)
        if self._routing is not None and self._routing is not before:
            self.struct.ids, self.struct.weights = (part.data_ptr() for part in self._routing)
            self._arrays["shown"][:] = 0
        return made


class NativeMoves(Moves[NativeInbox]):
    """See :class:`Moves`.

    Args:
        library: the helper.
        segments, layout: where they are, and what is where in one.

    Attributes:
        address: of what the helper knows of this Fleet.
    """

    in_c = True

    def __init__(
        self,
        params: FleetParams,
        placement: Placement,
        rank: int,
        owners: Ints,
        library: ctypes.CDLL,
        segments: AddressRange,
        layout: SegmentLayout,
    ) -> None:
        super().__init__(params, placement, rank, owners)
        world, num_local = self._world, placement.num_local(rank)
        self._segments, self._hidden = segments, params.token_hidden_size
        self._expert_rows = np.zeros(num_local, np.int64)
        self._tokens_type = ctypes.c_int64 * world
        self._all_present = _as_bits(self._everybody)
        self._struct = FleetStruct(
            base=segments.address,
            stride=segments.stride,
            rank=rank,
            world=world,
            most=params.max_tokens_per_rank,
            topk=params.max_topk,
            hidden=self._hidden,
            row_bytes=layout.row_bytes,
            scale_bytes=layout.scale_bytes,
            experts=params.num_experts,
            locals=num_local,
            layout=_LAYOUTS[params.resolved_layout],
            block=params.received_shape(world, num_local)[-1],
            home_rows=params.recv_capacity(world),
            ids=layout.ids,
            weights=layout.weights,
            offsets=layout.offsets,
            scales=layout.scales,
            tokens=layout.tokens,
            combined=layout.combined,
            local=self.local.ctypes.data,
            owner=owners.ctypes.data,
            rows_received=self.rows_received.ctypes.data,
            rows_sent=self.rows_sent.ctypes.data,
            expert_rows=self._expert_rows.ctypes.data,
            stream_bytes=STREAM_BYTES,
            ties_away=ties_go_away(),
        )
        self.address = ctypes.addressof(self._struct)
        self._store, self._arrive, self._gather = (
            library.moefleet_store, library.moefleet_arrive, library.moefleet_gather,
        )  # fmt: skip
        self._read, self._experts = library.moefleet_read, params.num_experts
        self._give, self._sum = library.moefleet_give, library.moefleet_sum

    def tokens_per_expert(self) -> list[int]:
        return self._expert_rows.tolist()

    def set_owners(self, owners: Ints) -> None:
        super().set_owners(owners)
        self._struct.owner = owners.ctypes.data

    def read(self, routing: Routing, ids: torch.Tensor, weights: torch.Tensor) -> bool:
        if not self._read(
            ids.data_ptr(), ids.dtype is torch.int64, weights.data_ptr(), routing.ids.size, self._experts,
            routing.ids_at, routing.weights_at,
        ):  # fmt: skip
            return False
        routing.back = None
        return True

    def store(self, at: BufferSet, tokens: torch.Tensor, scales: torch.Tensor | None, routing: Routing) -> None:
        scale_at, scale_pitch = None, 0
        tokens, pitch = self._pitched(tokens)
        if scales is not None:
            scales = dense(scales)
            scale_at, scale_pitch = scales.data_ptr(), scales.stride(0) * scales.itemsize
        count, topk = routing.ids.shape
        self._store(
            self.address, at.parity, count, tokens.data_ptr(), pitch, scale_at, scale_pitch,
            routing.ids_at, routing.weights_at, topk,
        )  # fmt: skip

    def arrive(self, at: BufferSet, inbox: NativeInbox, tokens: list[int] | Tokens, present: int, topk: int) -> int:
        if isinstance(tokens, list):
            tokens = self._tokens_type(*tokens)
        return self._arrive(self.address, inbox.address, at.parity, tokens, topk)

    def gather(self, at: BufferSet, inbox: NativeInbox, dtype: torch.dtype) -> None:
        self._gather(self.address, inbox.address, at.parity)

    def give(self, at: BufferSet, inbox: NativeInbox, rows: torch.Tensor) -> None:
        rows, pitch = self._pitched(rows)
        self._give(self.address, inbox.address, at.parity, TYPE_CODES[rows.dtype], rows.data_ptr(), pitch)

    def sum(
        self,
        at: BufferSet,
        routing: Routing,
        present: int,
        dtype: torch.dtype,
        out: torch.Tensor | None,
        checked: bool,
    ) -> tuple[torch.Tensor, bool]:
        count, topk = routing.ids.shape
        if out is None or not out.is_contiguous() or out.is_neg():
            out = at.tokens[dtype].new_empty(count, self._hidden)
        bits = self._all_present if present == self._everybody else _as_bits(present)
        unserved = self._sum(
            self.address, at.parity, TYPE_CODES[dtype], routing.ids_at, count, topk, bits, checked, out.data_ptr()
        )
        return out, unserved > 0

    def _pitched(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Rows ``[..., H]`` whose elements lie side by side, and how many bytes lie from one to the next."""
        if rows.is_contiguous() and not rows.is_neg():
            return rows, self._hidden * rows.itemsize
        rows = dense(rows.reshape(-1, self._hidden))
        return rows, rows.stride(0) * rows.itemsize


def _as_bits(ranks: int) -> bytes:
    return ranks.to_bytes(MAX_RANKS // 8, "little")
