"""Waiting for the peers' flags: spin a little, sleep in the kernel, end for a reason that names the peer.

A waiter sleeps on the flag of one peer that is missing, and says in its control block on whose. Who commits a phase
wakes the sleepers only if nobody is missing any more, so that a sleeper is woken once for all its peers: on a machine
with fewer cores than ranks, wake-ups are what a step costs. No wake-up is lost, because both sides store, fence, then
load: of the last two who commit at least one sees that all have, and a sleeper that a committer does not see yet sees
the committer's flag.

Without fault tolerance a missing peer raises. With it, it is left out, and accused unless it was merely seen in a round
of agreement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import MoEEpPeerError, MoEEpTimeoutError
from .control import SETS, Operation, State, Word, flag_word
from .faults import FaultState
from .futex import fence, full_fence, futex_wait, futex_wake

POLL_S = 0.05
"""Longest sleep between two looks, and the most that one sleep counts towards a time budget: a waiter that was
itself stopped does not blame the time on its peers."""

CLOSED_POLL_S = 0.002
"""The same for CLOSED flags, which are stored without waking anybody."""

LONGEST = 8
"""Times the spinning time that a wait spins at most by the clock: only time of its own counts, not that of a rank which
it yields its core to, as that one is likely what it waits for."""

PATIENCE = 3
"""Budgets for which a wait is prolonged while the peer says that it is itself waiting for somebody else: one stalled
rank does not make its neighbours accuse one another."""


_WAITING_ON, _WAITING_STEP, _WAITING_OPERATION = map(int, (Word.WAITING_ON, Word.WAITING_STEP, Word.WAITING_OPERATION))


class Waiter:
    """This rank's view of all ranks' flags.

    Args:
        words: all segments as 64-bit words.
        address: of word 0.
        blocks: for each rank the word index of its control block.
        rank: this rank.
        spin_s: how long to look before sleeping, in seconds of the thread's own time.
        timeout_s: budget of one wait, in seconds of the waiter's own running time.
        faults: who is accused, and whether a missing peer raises.
        dead: where deaths are noted, one entry for each rank; ``None`` makes it.
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
        dead: bytearray | npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._words, self._address, self._blocks = words, address, blocks
        self._rank, self.spin_s, self._timeout_s = rank, spin_s, timeout_s
        self._mine = blocks[rank]
        self._faults = faults
        self.dead = bytearray(len(blocks)) if dead is None else dead
        self.waited_s: npt.NDArray[np.float64] = np.zeros(len(blocks))
        """Seconds spent waiting for each rank, for several at once counted for each."""

    def mark(self, operation: Operation, step: int) -> None:
        """Publish a phase that hardly anybody waits for: whoever does looks often."""
        fence()
        self._words[self._mine + flag_word(operation, step)] = step

    def commit(self, operation: Operation, step: int) -> None:
        """Publish everything this rank wrote for the phase: one store, then wake whoever need not sleep any more."""
        flag = flag_word(operation, step)
        fence()
        self._words[self._mine + flag] = step
        full_fence()
        if self._faults.trusted == self._faults.everybody:
            for block in self._blocks:
                if self._words[block + flag] < step:
                    return  # that rank, or a later one, wakes them
        self.wake_sleepers()

    def committed(self, rank: int, operation: Operation, step: int) -> bool:
        return self._words[self._blocks[rank] + flag_word(operation, step)] >= step

    def publish(self, word: int, value: int) -> None:
        """Set a word of this rank's own control block."""
        self._words[self._mine + word] = value

    def said(self, rank: int, word: int) -> int:
        """Read a word of any rank's control block."""
        return self._words[self._blocks[rank] + word]

    def wake_sleepers(self) -> None:
        """Wake every rank that sleeps on any flag, so that it looks again at everything. A full fence comes before."""
        asleep = set()
        words = self._words
        for block in self._blocks:
            on = words[block + _WAITING_ON]
            if on and on <= len(self._blocks) and (operation := Operation.read(words[block + _WAITING_OPERATION])):
                step = words[block + _WAITING_STEP]
                asleep.add(self._blocks[on - 1] + flag_word(operation, step))
        for index in asleep:
            futex_wake(self._address + 8 * index)

    def wait(self, peers: Sequence[int], operation: Operation, step: int, *, spun_s: float = 0.0) -> list[int]:
        """Wait until all of ``peers`` have committed this phase of this step, or one has given the step up.

        Args:
            spun_s: how long the caller has looked again and again, in seconds, which counts as done here.

        Returns:
            With fault tolerance, those that never will: accused, or in a round. Else nobody.

        Raises:
            MoEEpPeerError: a peer waits for us in another call; without fault tolerance also: it ended or left.
            MoEEpTimeoutError: the budget is used up, without fault tolerance.
        """
        words, flag = self._words, flag_word(operation, step)
        missing = [peer for peer in peers if words[self._blocks[peer] + flag] < step]
        lost: list[int] = []
        if missing and self.spin_s > spun_s:
            missing = self._spin(missing, flag, step, self.spin_s - spun_s)
        if missing:
            self.publish(Word.WAITING_STEP, step)
            self.publish(Word.WAITING_OPERATION, operation)
            fence()  # who sees whom this rank waits for sees in which call, too
            lost = self._sleep(peers, missing, operation, step)
            self.publish(Word.WAITING_ON, 0)
        fence()
        return lost

    def _spin(self, missing: list[int], flag: int, step: int, spin_s: float) -> list[int]:
        start = now = time.perf_counter()
        used = time.thread_time()
        while missing and time.thread_time() - used < spin_s and now - start < LONGEST * spin_s:
            os.sched_yield()
            still = [peer for peer in missing if self._words[self._blocks[peer] + flag] < step]
            now = time.perf_counter()
            for peer in missing:
                if peer not in still:
                    self.waited_s[peer] += now - start
            missing = still
        return missing

    def look_for_deaths(self) -> None:
        """Accuse every peer that the operating system or the peer itself says is gone. Without waiting."""
        for peer in range(len(self._blocks)):
            if peer != self._rank and self._gone(peer):
                self._faults.accuse(peer)

    def _sleep(self, peers: Sequence[int], missing: list[int], operation: Operation, step: int) -> list[int]:
        flag, budget = flag_word(operation, step), self._timeout_s
        spent, prolonged = dict.fromkeys(missing, 0.0), dict.fromkeys(missing, 0.0)
        crossed: set[int] = set()
        lost: list[int] = []
        while True:
            self.publish(Word.WAITING_ON, missing[0] + 1)
            full_fence()
            gone = {peer: text for peer in missing if (text := self._gone(peer))}
            fence()  # flags after deaths: what a dead peer had committed counts
            seen = {peer: self._words[self._blocks[peer] + flag] for peer in missing}
            for peer in [peer for peer in missing if seen[peer] < step]:
                if peer in gone:
                    where = self._where(peer, operation, step)
                    self._give_up_on(peer, MoEEpPeerError(where + gone[peer], rank=peer, reason=gone[peer]))
                elif self._faults.tolerant and self._in_later_round(peer):
                    self._faults.behind = True
                elif spent[peer] >= budget:
                    text = f"nothing for {budget:g} s of waiting; it last said: {self.describe(peer)}"
                    where = self._where(peer, operation, step)
                    self._give_up_on(peer, MoEEpTimeoutError(where + text, ranks=[peer]))
                else:
                    self._raise_if_crossing(peer, operation, step, crossed)
                    continue
                lost.append(peer)
            left = [peer for peer in missing if seen[peer] < step and peer not in lost]
            if not left or self._somebody_failed(peers, operation, step):
                return lost
            if left[0] != missing[0]:
                missing = left
                continue  # it sleeps on another flag now, and says so first
            missing = left
            start = time.perf_counter()
            target = missing[0]
            longest = POLL_S if operation is not Operation.CLOSED else CLOSED_POLL_S
            nap = min(longest, *(budget - spent[peer] for peer in missing))
            futex_wait(self._address + 8 * (self._blocks[target] + flag), seen[target], max(nap, 0.0))
            slept = time.perf_counter() - start
            for peer in missing:
                self.waited_s[peer] += slept
                if self._waits_for_another(peer) and prolonged[peer] < PATIENCE * budget:
                    prolonged[peer] += min(slept, POLL_S)
                else:
                    spent[peer] += min(slept, POLL_S)

    def _somebody_failed(self, peers: Sequence[int], operation: Operation, step: int) -> bool:
        if operation is Operation.CLOSED:
            return False  # it is waited for because the step failed
        place = Word.FAILED + step % SETS
        return any(4 * step < self._words[self._blocks[peer] + place] <= 4 * step + operation.phase for peer in peers)

    def _give_up_on(self, peer: int, error: MoEEpPeerError | MoEEpTimeoutError) -> None:
        if not self._faults.tolerant:
            self.publish(Word.WAITING_ON, 0)
            raise error
        self._faults.accuse(peer)

    def _raise_if_crossing(self, peer: int, operation: Operation, step: int, crossed: set[int]) -> None:
        """Two looks in a row, since a peer's words are not read at one instant."""
        crossing = self._crossing(peer)
        if crossing and peer in crossed:
            self.publish(Word.WAITING_ON, peer + 1)  # stays until the next commit: the peer must find out as well
            raise MoEEpPeerError(
                self._where(peer, operation, step)
                + crossing
                + "; all ranks must make the same calls in the same order",
                rank=peer,
                reason=crossing,
            )
        (crossed.add if crossing else crossed.discard)(peer)

    def _in_later_round(self, peer: int) -> bool:
        """Whether the peer makes, or has adopted, a decision that this rank lacks: it may never commit this step."""
        return self.said(peer, Word.ROUND) > self._faults.epoch

    def _waits_for_another(self, peer: int) -> bool:
        if self.said(peer, Word.STATE) == State.IN_ROUND:
            return True
        return self.said(peer, Word.WAITING_ON) not in (0, self._rank + 1)

    def _gone(self, peer: int) -> str:
        if self.said(peer, Word.STATE) == State.DEPARTED:
            return "it has left (destroyed its Fleet or ended)"
        return "its process has ended" if self.dead[peer] else ""

    def _crossing(self, peer: int) -> str:
        """Whether the peer waits for a commit that we cannot make while we wait for it."""
        if self.said(peer, Word.WAITING_ON) != self._rank + 1:
            return ""
        fence()
        step, operation = self.said(peer, Word.WAITING_STEP), Operation.read(self.said(peer, Word.WAITING_OPERATION))
        if operation is Operation.NONE or self.committed(self._rank, operation, step):
            return ""
        return f"rank {peer} itself waits in {operation.phase.name.lower()} of step {step} for rank {self._rank}"

    def _where(self, peer: int, operation: Operation, step: int) -> str:
        return f"rank {self._rank} waits in {operation.phase.name.lower()} of step {step} for rank {peer}: "

    def describe(self, rank: int) -> str:
        """A rank's control block in words, for messages."""
        known = {int(state): state.name for state in State}
        state = known.get(self.said(rank, Word.STATE), "not started")
        operation = Operation.read(self.said(rank, Word.OPERATION)).name.lower()
        text = f"{state}, step {self.said(rank, Word.STEP)}, {operation}"
        if other := self.said(rank, Word.WAITING_ON):
            text += f", waiting for rank {other - 1}"
        return text
