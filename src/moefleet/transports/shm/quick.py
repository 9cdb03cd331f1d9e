"""The flags of a healthy step in C: one call commits a phase, one finds that all ranks have, and agree."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

from ...substrate.control import MASK_BYTES, SETS, Operation, Word, flag_word
from ...substrate.faults import FaultState
from ...substrate.waiting import Waiter
from .layout import SegmentLayout

MOST_SPIN_S = 0.005
"""Longest look in C: signals, such as Ctrl-C, wait for its end."""

Tokens: TypeAlias = "ctypes.Array[ctypes.c_int64]"
"""``[W]`` numbers of tokens, where C writes and reads them."""

_FAILED = int(Word.FAILED)

_PLACES = [[(flag_word(phase, step), SegmentLayout.header(phase, step)) for step in range(SETS)] for phase in Operation]
"""Of each phase and set: the word that commits it, and where its header is. Nothing asks for those of NONE, CLOSED."""


class QuickFlags:
    """What :class:`Steps` asks first. It knows no faults: where anything is unusual, it says so and changes nothing.

    Args:
        library: the helper.
        fleet: address of the :class:`~moefleet.native.FleetStruct`.
        waiter, faults, generation: as the :class:`Steps` has them.

    Attributes:
        spin_s: how long :meth:`collect` looks, in seconds.
    """

    def __init__(self, library: ctypes.CDLL, fleet: int, waiter: Waiter, faults: FaultState, generation: int) -> None:
        self._commit, self._collect = library.moefleet_commit, library.moefleet_collect
        self._fleet, self._waiter, self._faults, self._generation = fleet, waiter, faults, generation
        self.spin_s = min(waiter.spin_s, MOST_SPIN_S)
        self._waited = waiter.waited_s.ctypes.data
        self._tokens = (ctypes.c_int64 * faults.world_size)()
        self._bits: dict[int, bytes] = {}

    def commit(self, operation: Operation, step: int, tokens: int, topk: int, dtype: int) -> None:
        """Write the header and let the peers see this phase's data."""
        faults, trusted, (flag, header) = self._faults, self._faults.trusted, _PLACES[operation][step % SETS]
        if self._commit(
            self._fleet, flag, header, self._generation, faults.epoch, step, operation, tokens, topk, dtype,
            self._bits.get(trusted) or self._as_bits(trusted), trusted == faults.everybody,
        ):  # fmt: skip
            self._waiter.wake_sleepers()

    def collect(self, operation: Operation, step: int, taking: int) -> Tokens | None:
        """Tokens ``[W]`` of each rank in ``taking`` (bits), if all of them come soon, agree, and none gave up.

        They are good until the next call.
        """
        flag, header = _PLACES[operation][step % SETS]
        came = self._collect(
            self._fleet, flag, _FAILED + step % SETS, header, step, operation,
            self._bits.get(taking) or self._as_bits(taking), self.spin_s, self._waited, self._tokens,
        )  # fmt: skip
        return self._tokens if came else None

    def _as_bits(self, ranks: int) -> bytes:
        return self._bits.setdefault(ranks, ranks.to_bytes(MASK_BYTES, "little"))
