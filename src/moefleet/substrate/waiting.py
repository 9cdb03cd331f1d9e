"""Waiting for a peer's flag: spin a little, sleep in the kernel, end for a reason that names the peer.

Without fault tolerance a missing peer raises. With it, the wait answers False, and the peer is accused unless it was
merely seen in a round of agreement.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import MoEEpPeerError, MoEEpTimeoutError
from .control import Operation, State, Word, flag_word
from .faults import FaultState
from .futex import fence, futex_wait, futex_wake

POLL_S = 0.05
"""Longest sleep between two looks, and the most that one sleep counts towards a time budget: a waiter that was
itself stopped does not blame the time on its peers."""

PATIENCE = 3
"""Budgets for which a wait is prolonged while the peer says that it is itself waiting for somebody else: one stalled
rank does not make its neighbours accuse one another."""


class Waiter:
    """This rank's view of all ranks' flags.

    Args:
        words: all segments as 64-bit words.
        address: of word 0.
        blocks: for each rank the word index of its control block.
        rank: this rank.
        spin_s: how long to look before sleeping, in seconds.
        timeout_s: budget of one wait, in seconds of the waiter's own running time.
        faults: who is accused, and whether a missing peer raises.
    """

    def __init__(
        self,
        words: memoryview,
        address: int,
        blocks: Sequence[int],
        rank: int,
        spin_s: float,
        timeout_s: float,
        faults: FaultState,
    ) -> None:
        self._words, self._address, self._blocks = words, address, blocks
        self._rank, self._spin_s, self._timeout_s = rank, spin_s, timeout_s
        self._mine = blocks[rank]
        self._faults = faults
        self.dead = bytearray(len(blocks))
        self.waited_s = [0.0] * len(blocks)

    def commit(self, operation: Operation, step: int) -> None:
        """Publish everything this rank wrote for the phase: one store, then wake whoever sleeps on it."""
        index = self._mine + flag_word(operation, step)
        fence()
        self._words[index] = step
        futex_wake(self._address + 8 * index)

    def committed(self, rank: int, operation: Operation, step: int) -> bool:
        return self._words[self._blocks[rank] + flag_word(operation, step)] >= step

    def publish(self, word: Word, value: int) -> None:
        """Set a word of this rank's own control block."""
        self._words[self._mine + word] = value

    def said(self, rank: int, word: Word) -> int:
        """Read a word of any rank's control block."""
        return self._words[self._blocks[rank] + word]

    def wake_all(self, rank: int) -> None:
        """Wake everybody who sleeps on any flag of ``rank``, so that they look at its state again."""
        for operation in (Operation.DISPATCH, Operation.COMBINE, Operation.CLOSED):
            for step in (0, 1):
                futex_wake(self._address + 8 * (self._blocks[rank] + flag_word(operation, step)))

    def wait(self, peer: int, operation: Operation, step: int) -> bool:
        """Wait until ``peer`` has committed this phase of this step. False where it never will, with fault tolerance.

        Raises:
            MoEEpPeerError: it waits for us in another call; without fault tolerance also: it ended or left.
            MoEEpTimeoutError: the budget is used up, without fault tolerance.
        """
        index = self._blocks[peer] + flag_word(operation, step)
        committed = True
        if self._words[index] < step:
            start = time.perf_counter()
            try:
                committed = self._wait_long(index, peer, operation, step)
            finally:
                self.waited_s[peer] += time.perf_counter() - start
        fence()
        return committed

    def look_for_deaths(self) -> None:
        """Accuse every peer that the operating system or the peer itself says is gone. Without waiting."""
        for peer in range(len(self._blocks)):
            if peer != self._rank and self._gone(peer):
                self._faults.accuse(peer)

    def _wait_long(self, index: int, peer: int, operation: Operation, step: int) -> bool:
        words = self._words
        if self._spin_s:
            end = time.perf_counter() + self._spin_s
            while time.perf_counter() < end:
                if words[index] >= step:
                    return True
        self.publish(Word.WAITING_STEP, step)
        self.publish(Word.WAITING_OPERATION, operation)
        self.publish(Word.WAITING_ON, peer + 1)
        try:
            return self._sleep(index, peer, operation, step)
        finally:
            self.publish(Word.WAITING_ON, 0)

    def _sleep(self, index: int, peer: int, operation: Operation, step: int) -> bool:
        spent = prolonged = 0.0
        crossed = False
        while True:
            gone = self._gone(peer)
            value = self._words[index]  # after looking for a death: what a dead peer had committed counts
            if value >= step:
                return True
            if gone:
                return self._missing(
                    peer, MoEEpPeerError(self._where(peer, operation, step) + gone, rank=peer, reason=gone)
                )
            if self._faults.tolerant and self.said(peer, Word.STATE) == State.IN_ROUND:
                self._faults.behind = True
                return False
            if crossing := self._crossing(peer):
                if crossed:
                    raise MoEEpPeerError(
                        self._where(peer, operation, step) + crossing + "; all ranks must make the same calls in the "
                        "same order",
                        rank=peer,
                        reason=crossing,
                    )
                crossed = True
            if spent >= self._timeout_s:
                text = f"nothing for {self._timeout_s:g} s of waiting; it last said: {self.describe(peer)}"
                return self._missing(peer, MoEEpTimeoutError(self._where(peer, operation, step) + text, ranks=[peer]))
            start = time.perf_counter()
            futex_wait(self._address + 8 * index, value, min(POLL_S, self._timeout_s - spent))
            ran = min(time.perf_counter() - start, POLL_S)
            if self._waits_for_another(peer) and prolonged < PATIENCE * self._timeout_s:
                prolonged += ran
            else:
                spent += ran

    def _missing(self, peer: int, error: MoEEpPeerError | MoEEpTimeoutError) -> bool:
        if not self._faults.tolerant:
            raise error
        self._faults.accuse(peer)
        return False

    def _waits_for_another(self, peer: int) -> bool:
        return self.said(peer, Word.WAITING_ON) not in (0, self._rank + 1)

    def _gone(self, peer: int) -> str:
        if self.said(peer, Word.STATE) == State.DEPARTED:
            return "it has left (destroyed its Fleet or ended)"
        return "its process has ended" if self.dead[peer] else ""

    def _crossing(self, peer: int) -> str:
        """Whether the peer waits for a commit that we cannot make while we wait for it."""
        if self.said(peer, Word.WAITING_ON) != self._rank + 1:
            return ""
        step, operation = self.said(peer, Word.WAITING_STEP), Operation(self.said(peer, Word.WAITING_OPERATION) & 3)
        if operation is Operation.NONE or self.committed(self._rank, operation, step):
            return ""
        return f"rank {peer} itself waits in {operation.name.lower()} of step {step} for rank {self._rank}"

    def _where(self, peer: int, operation: Operation, step: int) -> str:
        return f"rank {self._rank} waits in {operation.name.lower()} of step {step} for rank {peer}: "

    def describe(self, rank: int) -> str:
        """A rank's control block in words, for messages."""
        known = {int(state): state.name for state in State}
        state = known.get(self.said(rank, Word.STATE), "not started")
        operation = Operation(self.said(rank, Word.OPERATION) & 3).name.lower()
        text = f"{state}, step {self.said(rank, Word.STEP)}, {operation}"
        if other := self.said(rank, Word.WAITING_ON):
            text += f", waiting for rank {other - 1}"
        return text
