"""Dispatch and combine of a healthy step in one call of the helper each.

Single calls that Python makes one after the other find cold caches after each wait: with more ranks than cores, and
after rows that fill the caches, that is what a small step costs. So is Python itself: what one step found out about a
kind of tensors is kept in its :class:`Part`, and a later step with tensors of that kind goes straight to the helper.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...native import CALL, PartStruct
from ...substrate.control import SETS, as_bits
from ...substrate.faults import FaultState
from ...substrate.native_gather import TYPE_CODES
from ...substrate.rowtypes import row_code
from ...tensors import is_plain
from .compiled import NativeInbox, NativeMoves
from .moves import Routing
from .results import Results

pack = CALL.pack
"""Makes of a call's arguments what :attr:`WholePhases.dispatch_call` and ``combine_call`` take."""

MOST_SHAPES = 16
"""Of handles that have left something, the last used: prompts have any number of tokens."""


class Reached(enum.IntEnum):
    """How far a call came; the rest is done in Python."""

    ROUTES = 0  # committed
    COMMITTED = 1
    REFUSED = 2  # rows arrived that do not fit, or are not as many as expected
    DONE = 3


class Part:
    """What a rank brings to a step, and to later ones of its parity that are like it.

    Attributes:
        struct, address: that, as the helper takes it.
        fleet: the :attr:`WholePhases.fleet` that it goes with.
        inbox: where rows are received.
        scaled: whether scales go with the tokens.
        sent, sent_types: shape and type of tokens for which the struct is good, if they are plain; no type: none are.
        made, made_types: the same of experts' rows.
        home: shape of the sums, ``[T, H]``; ``make`` makes a tensor for them.
    """

    __slots__ = (
        *("address", "fleet", "home", "inbox", "make", "scaled", "struct"),
        *("made", "made_types", "sent", "sent_types"),
    )

    sent: Sequence[int]
    made: Sequence[int]
    sent_types: tuple[torch.dtype, ...]
    made_types: tuple[torch.dtype, ...]
    make: Callable[[], torch.Tensor]

    def __init__(self, fleet: int, inbox: NativeInbox, struct: PartStruct, scaled: bool) -> None:
        self.fleet, self.inbox, self.struct, self.scaled = fleet, inbox, struct, scaled
        self.address = ctypes.addressof(struct)
        self.home: Sequence[int] | None = None  # until it is there, the rest of what is kept is not

    def keep_sent(self, tokens: torch.Tensor) -> bool:
        """Keep what holds for tokens such as these, that were just sent. Returns whether they are plain."""
        plain = not self.scaled and is_plain(tokens, tokens.shape, (tokens.dtype,), tokens.device)
        self.sent, self.sent_types = tokens.shape, (tokens.dtype,) if plain else ()
        return plain

    def keep_made(self, rows: torch.Tensor, results: Results) -> None:
        """The same of experts' rows that were just given back."""
        plain = is_plain(rows, rows.shape, (rows.dtype,), rows.device)
        self.made, self.made_types = rows.shape, (rows.dtype,) if plain else ()
        self.home, self.make = (count := self.struct.count, rows.shape[-1]), results.maker(count, rows.dtype)


class Known(list[Any]):
    """Steps of a handle, one of each parity, that later ones with tensors of the same kind can be like.

    Attributes:
        routing: the memory that they read routing from.
    """

    def __init__(self, routing: Routing) -> None:
        super().__init__([None] * SETS)
        self.routing = routing


class WholePhases:
    """See the module.

    Args:
        library: the helper.
        moves: which does the same in single calls.
        faults: whom this rank trusts.

    Attributes:
        dispatch_call, combine_call: the helper's own, see ``phases.c``; of what :data:`pack` makes.
        fleet: the first that goes into it.
        everybody: all ranks, as it takes them.
        known: of each handle that is used again and again. It ends with this topology, whose memory it needs.
        results: memory for sums.
        left: by shapes ``[T, K]`` of handles that are gone what they knew, for later ones of their shape: a layer makes
            a handle for each forward.
    """

    def __init__(self, library: ctypes.CDLL, moves: NativeMoves, faults: FaultState) -> None:
        self.dispatch_call, self.combine_call = library.moefleet_dispatch, library.moefleet_combine
        self.fleet, self.everybody = moves.address, as_bits(faults.everybody)
        self.known: WeakKeyDictionary[object, Known] = WeakKeyDictionary()
        self.left: dict[torch.Size, list[Known]] = {}
        self._moves, self._faults, self.results = moves, faults, moves.results

    def inherit(self, handle: object, shape: torch.Size) -> Known | None:
        """What a handle that is gone has left for ``handle``."""
        if not (left := self.left.get(shape)):
            return None
        known = self.known[handle] = left.pop()
        return known

    def leave(self, handle: object, shape: torch.Size) -> None:
        """Keep what ``handle`` knew, which goes. Of a shape that had none before only the shape is noted."""
        known, left = self.known.pop(handle, None), self.left.pop(shape, [])
        if known is not None and len(left) < SETS:
            left.append(known)
        self.left[shape] = left
        if len(self.left) > MOST_SHAPES:
            del self.left[next(iter(self.left))]

    def dispatch(
        self,
        step: int,
        inbox: NativeInbox,
        routing: Routing,
        tokens: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: int,
        placed: bool,
        expected: int | None,
    ) -> tuple[Part, int]:
        """From storing (or placing) tokens ``[T, H]`` to gathering what is for this rank; ``expected``: rows.

        Returns:
            What combine needs, and how far it came, see :class:`Reached`; where that is to the end, plus the number of
            rows that arrived.
        """
        (tokens, pitch), scaled = self._moves.pitched(tokens), scales is not None
        scales, scales_at, scale_pitch = self._moves.pitched_scales(scales)
        count, topk = routing.shape
        struct = PartStruct(
            inbox.address, routing.ids_at, routing.weights_at, count, topk, pitch, dtype, scales_at, scale_pitch,
            placed, -1 if expected is None else expected,
        )  # fmt: skip
        part, faults = Part(self.fleet, inbox, struct, scaled), self._faults
        trusted = as_bits(faults.trusted)
        packed = pack(self.fleet, part.address, step, faults.epoch, tokens.data_ptr(), 0, trusted, trusted)
        return part, self.dispatch_call(packed)

    def combine(
        self, step: int, part: Part, rows: torch.Tensor, present: int, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """From giving the experts' rows to the sum, as of :meth:`Moves.sum`, and how far it came: where that is
        further than :attr:`Reached.DONE`, by the first rank that served other tokens, plus one.
        """
        struct, faults = part.struct, self._faults
        part.home = None  # what is kept of rows holds no longer for the struct
        out = self._moves.room(rows.dtype, struct.count, out)
        given, struct.made_pitch = self._moves.pitched(rows)
        struct.made_type, struct.made_dtype = TYPE_CODES[rows.dtype], row_code(rows.dtype, None)
        packed = pack(
            self.fleet, part.address, step, faults.epoch, given.data_ptr(), out.data_ptr(), as_bits(faults.trusted),
            as_bits(present),
        )  # fmt: skip
        return out, self.combine_call(packed)
