"""Dispatch and combine of a healthy step in one call of the helper each.

Single calls that Python makes one after the other find cold caches after each wait: with more ranks than cores, and
after rows that fill the caches, that is what a small step costs.
"""

from __future__ import annotations

import ctypes
import enum

import torch

from ...substrate.control import as_bits
from ...substrate.native_gather import TYPE_CODES
from .compiled import NativeInbox, NativeMoves
from .moves import Routing
from .quick import QuickFlags


class Reached(enum.IntEnum):
    """How far a call came; the rest is done in Python."""

    ROUTES = 0  # committed
    COMMITTED = 1
    REFUSED = 2  # rows arrived that do not fit, or are not as many as expected
    DONE = 3


class WholePhases:
    """See the module.

    Args:
        library: the helper.
        moves, quick: which do the same in single calls.
    """

    def __init__(self, library: ctypes.CDLL, moves: NativeMoves, quick: QuickFlags) -> None:
        self._dispatch, self._combine = library.moefleet_dispatch, library.moefleet_combine
        self._moves, self._quick, self._fleet = moves, quick, moves.address
        self._unserved = ctypes.c_int64()
        self._unserved_at = ctypes.addressof(self._unserved)

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
    ) -> int:
        """From storing (or placing) tokens ``[T, H]`` to gathering what is for this rank; ``expected``: rows.

        Returns:
            How far it came, see :class:`Reached`.
        """
        tokens, pitch = self._moves.pitched(tokens)
        scales, scale_at, scale_pitch = self._moves.pitched_scales(scales)
        epoch, trusted, all_trusted = self._quick.mind()
        count, topk = routing.shape
        reached: int = self._dispatch(
            self._fleet, inbox.address, step, epoch, count, tokens.data_ptr(), pitch, scale_at, scale_pitch,
            routing.ids_at, routing.weights_at, topk, dtype, placed, trusted, all_trusted,
            -1 if expected is None else expected,
        )  # fmt: skip
        return reached

    def combine(
        self,
        step: int,
        inbox: NativeInbox,
        routing: Routing,
        rows: torch.Tensor,
        dtype: int,
        present: int,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int | None] | None:
        """From giving the experts' rows to the sum, as of :meth:`Moves.sum`; ``None``: no further than commit."""
        moves, (count, topk) = self._moves, routing.shape
        out = moves.room(rows.dtype, count, out)
        given, pitch = moves.pitched(rows)
        epoch, trusted, all_trusted = self._quick.mind()
        reached = self._combine(
            self._fleet, inbox.address, step, epoch, TYPE_CODES[rows.dtype], given.data_ptr(), pitch, dtype,
            routing.ids_at, count, topk, trusted, all_trusted, as_bits(present), out.data_ptr(),
            self._unserved_at,
        )  # fmt: skip
        if reached < Reached.DONE:
            return None
        unserved = self._unserved.value
        return out, unserved - 1 if unserved else None
