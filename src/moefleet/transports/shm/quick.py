"""The flags of a healthy step in C: one call commits a phase, one finds that all ranks have, and agree."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

from ...native import FleetStruct
from ...substrate.control import SETS, Operation, as_bits, flag_word
from ...substrate.faults import FaultState
from ...substrate.group import cores
from ...substrate.waiting import Waiter
from .layout import SegmentLayout

MOST_SPIN_S = 0.005
"""Longest look in C, in the thread's own time: signals, such as Ctrl-C, wait for its end."""

Tokens: TypeAlias = "ctypes.Array[ctypes.c_int64]"
"""``[W]`` numbers, one for each rank, where C writes and reads them."""


class QuickFlags:
    """What :class:`Steps` asks first. It knows no faults: where anything is unusual, it says so and changes nothing.

    Args:
        library: the helper.
        fleet: what it knows of this Fleet; here it is told of flags.
        waiter, faults, generation: as the :class:`Steps` has them.
        early: whether peers may wait for routing before they place rows, see :attr:`Operation.ROUTES`.

    Attributes:
        tokens, placed: ``[W]`` of each rank, and whether it placed its rows, as was collected last.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        fleet: FleetStruct,
        waiter: Waiter,
        faults: FaultState,
        generation: int,
        *,
        early: bool = False,
    ) -> None:
        self._commit, self._collect = library.moefleet_commit, library.moefleet_collect
        self.tokens, self.placed = ((ctypes.c_int64 * faults.world_size)() for _ in range(2))
        self._struct, self._fleet, self._faults = fleet, ctypes.addressof(fleet), faults
        for phase in Operation:
            for step in range(SETS):
                fleet.flags[phase][step] = flag_word(phase, step)
                fleet.headers[phase][step] = SegmentLayout.header(phase.phase, step)
        fleet.generation, fleet.early, fleet.tolerant = generation, early, faults.tolerant
        fleet.crowded = cores() < faults.world_size
        fleet.spin_s = min(waiter.spin_s, MOST_SPIN_S)
        fleet.waited = waiter.waited_s.ctypes.data
        fleet.said_tokens, fleet.said_placed = map(ctypes.addressof, (self.tokens, self.placed))

    @property
    def spin_s(self) -> float:
        """How long :meth:`collect` looks, in seconds."""
        return self._struct.spin_s

    def commit(self, operation: Operation, step: int, tokens: int, topk: int, dtype: int, placed: int) -> None:
        """Write the header, let the peers see this phase's data, and wake those who wait for it."""
        trusted = as_bits(self._faults.trusted)
        self._commit(self._fleet, operation, step, self._faults.epoch, tokens, placed, topk, dtype, trusted)

    def collect(self, operation: Operation, step: int, taking: int) -> bool:
        """Whether all ranks in ``taking`` (bits) came soon, agree, and none gave up: then see ``tokens, placed``."""
        return self._collect(self._fleet, operation, step, as_bits(taking)) > 0
