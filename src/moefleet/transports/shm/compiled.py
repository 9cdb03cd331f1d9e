"""The movements in C: each is one call of the helper in ``moefleet.native``, with all addresses known beforehand."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...config import EpLayout, FleetParams
from ...native import READ, FleetStruct, InboxStruct, SentStruct
from ...placement import Placement
from ...substrate.control import SETS, as_bits
from ...substrate.inbox import Inbox
from ...substrate.memory import AddressRange
from ...substrate.native_gather import STREAM_BYTES, TYPE_CODES, dense, ties_go_away
from ...substrate.routes import Ints
from ...tensors import DispatchOutput
from .buffers import BufferSet
from .layout import SegmentLayout
from .moves import Moves, Ranks, Routing
from .quick import Tokens
from .results import Results

_LAYOUTS = {EpLayout.EXPERT_MAJOR: 0, EpLayout.RANK_MAJOR: 1, EpLayout.FLAT: 2}
_READ = READ.pack


class NativeInbox(Inbox):
    """Memory to receive into, and what :meth:`NativeMoves.arrive` finds out about the rows, as C sees it."""

    def __init__(self, params: FleetParams, world_size: int, num_local: int, rows: torch.Tensor | None = None) -> None:
        super().__init__(params, world_size, num_local, rows=rows)
        most = params.max_tokens_per_rank * world_size
        entries = most * min(params.max_topk, num_local) if self._layout is EpLayout.EXPERT_MAJOR else 0
        self._arrays: dict[str, npt.NDArray[Any]] = {  # pages are touched only where rows arrive
            "shown": np.zeros(world_size, np.int64),
            "brought": np.zeros(world_size, np.int64),
            "placed": np.zeros(world_size, np.int64),
            "bounds": np.zeros(world_size + 1, np.int64),
            "token": np.empty(most, np.int32),
            "bag": np.empty(most + 1, np.int64),
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
            topk=0,
            entered=0,
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
        struct, address: what the helper knows of this Fleet.
        gathered: ``[2, 2, L]``: how many bytes of an expert's rows in each set, and of what it made in each of the
            memories for that, are in huge pages, where the kernel has any: ``[:, 0]`` and ``[:, 1]``.
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
        self.results = Results(self._hidden)
        self._expert_rows = np.zeros(num_local, np.int64)
        slot, stamp = self._slots(placement), np.empty(params.num_experts, np.int64)
        sums = np.zeros(params.num_experts)
        next_ = np.empty(max(params.num_experts, world), np.int64)
        self.gathered = np.zeros((SETS, 2, num_local), np.int64)
        self._slot = slot
        self._kept: list[npt.NDArray[Any]] = [next_, stamp, sums]
        self._tokens_type = ctypes.c_int64 * world
        self.struct = FleetStruct(
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
            bound=layout.bound,
            made=layout.made or (0, 0),
            landing=layout.landing or (0, 0),
            sent=tuple(self._notes(params) for _ in layout.made),
            gathered=self.gathered.ctypes.data,
            slot=slot.ctypes.data,
            sums=sums.ctypes.data,
            next=next_.ctypes.data,
            stamp=stamp.ctypes.data,
            local=self.local.ctypes.data,
            rows_received=self.rows_received.ctypes.data,
            rows_sent=self.rows_sent.ctypes.data,
            expert_rows=self._expert_rows.ctypes.data,
            stream_bytes=STREAM_BYTES,
            ties_away=ties_go_away(),
        )
        self.address = ctypes.addressof(self.struct)
        self.set_owners(owners)
        self._store, self._push, self._arrive, self._gather = (
            library.moefleet_store, library.moefleet_push, library.moefleet_arrive, library.moefleet_gather,
        )  # fmt: skip
        self._read, self._experts = library.moefleet_read, params.num_experts
        self._give, self._sum = library.moefleet_give, library.moefleet_sum

    def tokens_per_expert(self) -> list[int]:
        return self._expert_rows.tolist()

    def set_owners(self, owners: Ints) -> None:
        super().set_owners(owners)
        self._order = np.full(len(owners), -1)
        self._ordered = np.lexsort((self._slot[:-1], owners[:-1]))
        self._order[self._ordered] = np.where(owners[self._ordered] < 0, -1, np.arange(len(self._ordered)))
        self.struct.owner = owners.ctypes.data
        self.struct.order, self.struct.ordered = self._order.ctypes.data, self._ordered.ctypes.data

    def read(self, routing: Routing, ids: torch.Tensor, weights: torch.Tensor) -> bool:
        packed = _READ(
            ids.data_ptr(), ids.dtype is torch.int64, weights.data_ptr(), ids.numel(), self._experts,
            routing.ids_at, routing.weights_at,
        )  # fmt: skip
        if not self._read(packed):
            return False
        routing.back = None
        return True

    def store(self, at: BufferSet, tokens: torch.Tensor | None, scales: torch.Tensor | None, routing: Routing) -> None:
        tokens_at, pitch = None, 0
        if tokens is not None:
            tokens, pitch = self.pitched(tokens)
            tokens_at = tokens.data_ptr()
        scales, scale_at, scale_pitch = self.pitched_scales(scales)
        count, topk = routing.shape
        self._store(
            self.address, at.parity, count, tokens_at, pitch, scale_at, scale_pitch,
            routing.ids_at, routing.weights_at, topk,
        )  # fmt: skip

    def push(self, at: BufferSet, tokens: torch.Tensor, routing: Routing, before: Ranks, to: int) -> None:
        tokens, pitch = self.pitched(tokens)
        count, topk = routing.shape
        self._push(
            self.address, at.parity, self._in_c(before), as_bits(to), count, tokens.data_ptr(), pitch,
            routing.ids_at, routing.weights_at, topk,
        )  # fmt: skip

    def arrive(self, at: BufferSet, inbox: NativeInbox, tokens: Ranks, placed: Ranks, present: int, topk: int) -> int:
        return self._arrive(self.address, inbox.address, at.parity, self._in_c(tokens), self._in_c(placed), topk)

    def gather(self, at: BufferSet, inbox: NativeInbox, dtype: torch.dtype, step: int) -> None:
        self._gather(self.address, inbox.address, step)

    def making(self, step: int) -> int:
        return self.struct.making[step % SETS]

    def give(self, at: BufferSet, inbox: NativeInbox, rows: torch.Tensor) -> int:
        rows, pitch = self.pitched(rows)
        code = TYPE_CODES[rows.dtype]
        return self._give(self.address, inbox.address, at.parity, code, rows.data_ptr(), pitch)

    def sum(
        self,
        at: BufferSet,
        routing: Routing,
        present: int,
        placed: Ranks,
        dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int | None]:
        count, topk = routing.shape
        out = self.room(dtype, count, out)
        unserved = self._sum(
            self.address, at.parity, TYPE_CODES[dtype], routing.ids_at, count, topk, as_bits(present),
            self._in_c(placed), out.data_ptr(),
        )  # fmt: skip
        return out, unserved - 1 if unserved else None

    def room(self, dtype: torch.dtype, count: int, out: torch.Tensor | None) -> torch.Tensor:
        """``[count, H]`` to write sums to: ``out``, if C can write it."""
        if type(out) is not torch.Tensor or not out.is_contiguous() or out.is_neg():
            return self.results.maker(count, dtype)()
        return out

    def _in_c(self, ranks: Ranks) -> Tokens:
        """Numbers of ranks where C can read them."""
        return ranks if isinstance(ranks, self._tokens_type) else self._tokens_type(*ranks)

    def _slots(self, placement: Placement) -> Ints:
        """``[E+1]`` local index of each expert at the rank that holds it; the last entry is for id -1."""
        slots = np.full(len(self.owners), -1)
        for rank in range(self._world):
            local = placement.local_table(rank).numpy()
            slots[:-1][local >= 0] = local[local >= 0]
        return slots

    def _notes(self, params: FleetParams) -> SentStruct:
        """Room for what is noted of the rows of one set; pages are touched only where rows are sent."""
        most = params.max_tokens_per_rank
        slots = most * params.max_topk
        arrays: dict[str, npt.NDArray[Any]] = {
            "bag": np.empty(most + 1, np.int64),
            "rank": np.empty(slots, np.int64),
            "place": np.empty(slots, np.int64),
            "weight": np.empty(slots, np.float32),
        }
        self._kept.extend(arrays.values())
        return SentStruct(**{name: array.ctypes.data for name, array in arrays.items()})

    @staticmethod
    def pitched_scales(scales: torch.Tensor | None) -> tuple[torch.Tensor | None, int | None, int]:
        """Scales whose bytes lie side by side, where they are, and how many bytes lie from one token's to the next."""
        if scales is None:
            return None, None, 0
        scales = dense(scales)
        return scales, scales.data_ptr(), scales.stride(0) * scales.itemsize

    def pitched(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Rows ``[..., H]`` whose elements lie side by side, and how many bytes lie from one to the next."""
        if rows.is_contiguous() and not rows.is_neg():
            return rows, self._hidden * rows.itemsize
        rows = dense(rows.reshape(-1, self._hidden))
        return rows, rows.stride(0) * rows.itemsize
