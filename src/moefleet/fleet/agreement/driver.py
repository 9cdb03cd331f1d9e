"""The agreement on a real store and clock: each of a Fleet's calls runs the protocol to its end, in bounded time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ...errors import MoEEpNoQuorumError, MoEEpRankEvictedError
from ...knobs import FleetAlgoKnobFaultTolerance
from .clock import TICK_S, RunningClock
from .history import History, check_store, lost
from .protocol import (
    Call,
    Done,
    Fail,
    Failure,
    Member,
    Offer,
    Operation,
    Post,
    Read,
    ReadViews,
    Response,
    Views,
    Wait,
    Woken,
    advance,
    begin,
)
from .values import Decision, Kind, bit_set, first_decision, mask_list, members

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Pause before the second look at the store, in seconds, and the longest one; each is twice as long as the one before.
With many ranks on the store both grow in proportion (:data:`RANKS_PER_FIRST`, :data:`RANKS_PER_LONGEST`)."""
RANKS_PER_FIRST, RANKS_PER_LONGEST = 16, 64


class Agreement:
    """One rank's part in the agreement: what it adopted, and the calls that bring it on.

    Calls of one rank come one at a time. A call that raises leaves the mask as it was.

    Args:
        store: a ``torch.distributed`` store that outlives every rank, under this fleet's id and generation
            (``PrefixStore``). It gets a connection of its own.
        rank, world_size: who this is, among how many.
        options: time-outs and quorum.
        incarnation: which life of the rank this is; it is part of the views that others can read.
        dead: the ranks that the operating system has proven dead. Called often and from another thread.
        in_round: publishes that this rank is in round ``k``, so that peers stop waiting for it in a step. Called when a
            call begins, before anything else, and for each further round; the second from another thread.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        options: FleetAlgoKnobFaultTolerance | None = None,
        *,
        incarnation: int = 0,
        dead: Callable[[], Iterable[int]] = tuple,
        in_round: Callable[[int], None] = lambda number: None,
    ) -> None:
        check_store(store)
        self.options = options or FleetAlgoKnobFaultTolerance()
        self._member = Member(rank, world_size, self.options.quorum, incarnation)
        self._store, self._dead, self._in_round = store, dead, in_round
        self._history: History | None = _connect(store)  # now, while nothing is wrong: it can take long
        self._decision = first_decision(world_size)
        self._evicted_by: Decision | None = None

    @property
    def rank(self) -> int:
        """Who this is."""
        return self._member.rank

    @property
    def decision(self) -> Decision:
        """The last decision that this rank adopted."""
        return self._decision

    @property
    def epoch(self) -> int:
        """Its number; 0 before the first."""
        return self._decision.number

    @property
    def mask(self) -> tuple[int, ...]:
        """Its mask: one int per rank, 1 = active."""
        return mask_list(self._decision.mask, self._member.world)

    @property
    def evicted(self) -> bool:
        """Whether this rank has been told that the others went on without it."""
        return self._evicted_by is not None

    def reconcile(self, accused: Iterable[int], last_step: int, *, timeout_s: float | None = None) -> Decision:
        """Agree with the other survivors on one mask, and adopt it.

        Args:
            accused: ranks that this one gave up on since the last decision. The proven dead are added.
            last_step: the last step that this rank began; -1 before the first.
            timeout_s: instead of ``reconcile_timeout_s``.

        Returns:
            The decision now in force: its mask includes this rank, and ``resume_step`` is past ``last_step``.

        Raises:
            MoEEpRankEvictedError: the others went on without this rank.
            MoEEpNoQuorumError: too few ranks answered in time.
            MoEEpStoreError: the store did not answer.
        """
        if self._evicted_by is not None:
            raise self._evicted(self._evicted_by)
        found = bit_set({*accused, *self._dead()}) & ~(1 << self._member.rank)
        return self._call(Call(Kind.RECONCILE, found, last_step), timeout_s)

    def readmit(self, last_step: int, *, timeout_s: float | None = None) -> Decision:
        """Take masked ranks back; called by the survivors and, after it dropped its handles, by an evicted rank.

        The call waits for all ranks that are not proven dead, until its time is over; who did not come stays masked.
        Accusations are forgiven. Arguments, result and errors are those of :meth:`reconcile`; a rank that is masked
        and does not know it yet gets the eviction error first, and may then call again.
        """
        return self._call(Call(Kind.READMIT, last_step=last_step), timeout_s)

    def _call(self, call: Call, timeout_s: float | None) -> Decision:
        options, world = self.options, self._member.world
        timeout_s = options.reconcile_timeout_s if timeout_s is None else timeout_s
        self._in_round(self._decision.number + 1)
        run = _Run(self, call, timeout_s)
        run.start()
        clock, most_s = RunningClock(), timeout_s + world * options.coordinator_takeover_s
        try:
            # A store whose process is stopped blocks for ever inside torch; the thread is then left behind.
            while run.is_alive() and clock() < most_s:
                run.join(TICK_S)
        finally:
            run.abandoned = True
        result, error = run.result, run.error
        self._history = None if result is None else run.history
        if error is not None:
            raise error
        if result is None:
            raise lost(self._store)
        return self._conclude(result, timeout_s)

    def _conclude(self, result: Done | Fail, timeout_s: float) -> Decision:
        if isinstance(result, Done):
            self._decision, self._evicted_by = result.decision, None
            return result.decision
        if result.failure is Failure.EVICTED:
            self._evicted_by = result.decision
            raise self._evicted(result.decision)
        active, lacking = list(members(result.decision.mask)), list(members(result.ranks))
        raise MoEEpNoQuorumError(
            f"rank {self._member.rank} found no quorum for decision {result.decision.number + 1}: of the active ranks "
            f"{active}, {lacking} did not answer within {timeout_s:g} s (reconcile_timeout_s) and not all of them are "
            "proven dead; the mask is unchanged"
        )

    def _evicted(self, decision: Decision) -> MoEEpRankEvictedError:
        return MoEEpRankEvictedError(
            f"rank {self._member.rank} was masked by decision {decision.number}; ranks {list(members(decision.mask))} "
            "went on without it. Drop its handles, then clear_faults(readmit=True) on all ranks, or end the process"
        )


class _Run(threading.Thread):
    """One call: does the protocol's operations until it is over, the caller gives up, or something is raised."""

    def __init__(self, agreement: Agreement, call: Call, timeout_s: float) -> None:
        super().__init__(name=f"moefleet-agreement-{agreement._member.rank}", daemon=True)
        self.result: Done | Fail | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self.history = agreement._history
        self._agreement, self._member, self._call = agreement, agreement._member, call
        takeover_s = agreement.options.coordinator_takeover_s
        self._takeover_s, self._gathered_at = takeover_s, timeout_s
        self._over_at = timeout_s + self._member.world * takeover_s
        self._turn: tuple[int, int] | None = None
        self._turn_over_at = 0.0
        longest_s = LONGEST_PAUSE_S * math.ceil(self._member.world / RANKS_PER_LONGEST)
        self._longest_pause_s = min(longest_s, takeover_s / 4)
        self._first_pause_s = FIRST_PAUSE_S * math.ceil(self._member.world / RANKS_PER_FIRST)
        self._look_s = min(1.0, takeover_s / 4)
        self._pause_s = 0.0
        self._seen_dead = 0

    def run(self) -> None:
        try:
            self.result = self._agree()
        except Exception as error:
            self.error = error

    def _agree(self) -> Done | Fail | None:
        agreement = self._agreement
        self._clock = RunningClock()
        if self.history is None:
            self.history = _connect(agreement._store)
        state, operation = begin(self._member, agreement.decision, self._call, evicted=agreement.evicted)
        while not isinstance(operation, (Done, Fail)):
            if self.abandoned:
                return None
            state, operation = advance(state, self._do(self.history, operation))
        return operation

    def _do(self, history: History, operation: Operation) -> Response:
        if isinstance(operation, Read):
            return history.decision(operation.number)
        if isinstance(operation, Post):
            self._agreement._in_round(operation.number)
            self._pause_s, self._seen_dead = 0.0, 0
            history.post(operation.number, operation.view)
            return None
        if isinstance(operation, Wait):
            return self._wait(history, operation)
        if isinstance(operation, ReadViews):
            self._seen_dead = self._dead()
            return Views(history.views(operation.number), self._seen_dead)
        assert isinstance(operation, Offer)
        return history.offer(operation.decision)

    def _wait(self, history: History, wait: Wait) -> Response:
        """Look for the decision, less and less often. One that is there counts even if time is over."""
        clock = self._clock
        ends = self._gathered_at
        if wait.turn is not None:
            if self._turn != (wait.number, wait.turn):
                self._turn, self._turn_over_at = (wait.number, wait.turn), clock() + self._takeover_s
            ends = min(self._turn_over_at, self._over_at)
        look = clock() + self._look_s
        while True:
            self._pause(ends)
            decision = history.decision(wait.number)
            now = clock()
            if decision is not None:
                return decision
            if now >= ends:
                return Woken.EXPIRED
            dead = self._dead()
            first = next(members(wait.active & ~dead), None) == self._member.rank
            if first or now >= look or dead != self._seen_dead or self.abandoned:
                return Woken.LOOK

    def _pause(self, ends: float) -> None:
        """Sleep until the next look at the store, a death, or the end of the wait."""
        until = min(self._clock() + self._pause_s, ends)
        while (left := until - self._clock()) > 0 and self._dead() == self._seen_dead and not self.abandoned:
            time.sleep(min(left, TICK_S))
        self._pause_s = min(max(2 * self._pause_s, self._first_pause_s), self._longest_pause_s)

    def _dead(self) -> int:
        return bit_set(self._agreement._dead()) & ~(1 << self._member.rank)


def _connect(store: Any) -> History:
    try:
        return History(store.clone())
    except Exception as error:
        raise lost(store) from error
