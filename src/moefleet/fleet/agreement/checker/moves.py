"""What one rank may do next in the agreement model, and what a new decision does to the others.

Fewer orders are enough than there are. Each reduction says why what it leaves out changes nothing.

1. *Reading a decision that exists* is done at once: decisions are written once, so the read gives the same whenever it
   is done, and nobody sees it. This holds for a wait as well, which completes. It also wakes ranks that are not in a
   call: entering one is reading. A rank that comes late is one that stays before its next read.
2. *Reading that there is no decision* is done together with what follows, the post. In between the decision may appear;
   then the post comes too late to be counted, and the rank goes on as a waiting one. So where a decision is written, a
   rank before its read is taken both ways.
3. *Reading views* is done together with the post, look or time-out before it. What is posted in between can as well be
   posted before, for the rank keeps no views: what it knows is what it read last. A decision written between the
   time-out and the read can as well be written after the read, for it does not change the views.
4. *Looking once more before giving up* is done together with the time-out before it: had there been a decision, the
   rank would have heeded it just as a waiting one does.
5. *Views of a decided round* are forgotten: whoever would still read them offers in vain.
6. *A look that leads back to the same wait* is left out.
7. *A crash before a write that comes too late* (see 2) is left out: nobody can tell it from one before the next write.

Of the ranks proven dead an observer knows any subset of those that crashed, each time anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..protocol import (
    Call,
    Done,
    Fail,
    Failure,
    Member,
    Offer,
    Phase,
    Post,
    Read,
    Response,
    Views,
    Wait,
    Woken,
    advance,
)
from ..values import Kind
from .properties import check_adopted, check_offer, check_once, check_told
from .search import Violation
from .words import does, gets
from .world import Advance, AnyOperation, Begin, Overwrite, Place, Setting, Store, begin_call, crashed_place, subsets


@dataclass(frozen=True)
class Move:
    """One thing that a rank may do.

    Attributes:
        place, store: where the rank is afterwards, and what the store then holds.
        words: what it did.
        operations: how many store operations that took.
        wrote: number of the decision that it wrote, 0 for none.
    """

    place: Place
    store: Store
    words: str
    operations: int
    wrote: int = 0


class Moves:
    """The moves of ranks in one setting, under the protocol or a mutant of it (``advance`` and ``begin``)."""

    def __init__(self, setting: Setting, advance: Advance = advance, begin: Begin = begin_call) -> None:
        self.setting, self._advance, self._begin = setting, advance, begin
        self._members = [Member(rank, setting.world, setting.quorum) for rank in range(setting.world)]

    def of(self, here: Place, store: Store, crashed: int) -> Iterator[Move]:
        """What a rank may do. Whatever it could read is read already."""
        operation = here.operation
        if here.crashed:
            return
        if here.state is None:
            for begun in self._enter(here):
                yield from self._beyond_horizon_or(begun, store, crashed, 1)
        elif isinstance(operation, Read):
            yield from self._beyond_horizon_or(here, store, crashed, 0)
        elif isinstance(operation, Wait):
            views = store.posted[operation.number - 1]
            reasons = [Woken.LOOK, Woken.EXPIRED] if self.setting.timeouts else [Woken.LOOK]
            for reason, dead in product(reasons, subsets(crashed)):
                state, _ = self._advance(here.state, reason)
                state, after = self._advance(state, Views(views, dead))
                if (state, after) != (here.state, operation):
                    why = "looks" if reason is Woken.LOOK else "runs out of time"
                    moved = replace(here, state=state, operation=after)
                    yield from self._go_on(moved, store, crashed, f"{why}: {gets(Views(views, dead))};", 2)
                elif reason is Woken.EXPIRED:
                    raise Violation("f", f"rank {here.rank} {does(operation)} anew whenever its time is over")
        else:
            assert isinstance(operation, (Offer, Overwrite)), operation
            decision = operation.decision
            check_once(store.decision(decision.number), decision)
            if self.setting.crashes:
                yield self._crash(here, store, "before it decides")
            written = store.decide(decision).forget_views(decision.number)
            yield from self._respond(here, decision, written, crashed, f"{does(operation)};", 1, decision.number)

    def woken(self, here: Place, store: Store, number: int, operations: int = 0) -> Iterator[Move]:
        """Where a rank may be once it has read decision ``number``, which was just written. It writes nothing."""
        operation = here.operation
        if here.state is None:
            entered = [] if here.crashed else list(self._enter(here))
            for begun in entered:
                yield from self._woken_before_read(begun, store, number, operations)
            if not entered:
                yield Move(here, store, "", operations)
        elif isinstance(operation, Read):
            yield from self._woken_before_read(here, store, number, operations)
        elif _hears_of(operation) == number:
            yield from self._respond(here, store.decision(number), store, 0, "", operations + 1)
        else:
            yield Move(here, store, "", operations)

    def _woken_before_read(self, here: Place, store: Store, number: int, operations: int) -> Iterator[Move]:
        operation, state = here.operation, here.state
        assert isinstance(operation, Read) and state is not None
        if store.decision(operation.number) is None:
            yield Move(here, store, "", operations)
            return
        yield from self._respond(here, store.decision(operation.number), store, 0, "", operations + 1)
        if operation.number != number:
            return
        state, after = self._advance(state, None)  # it had read before the decision was there
        late = replace(here, state=state, operation=after)
        if isinstance(after, Post):
            state, after = self._advance(state, None)
            yield from self.woken(replace(late, state=state, operation=after), store, number, operations + 2)
        elif isinstance(after, Done):
            yield from self.woken(self._end(late, store), store, number, operations + 1)

    def _enter(self, here: Place) -> Iterator[Place]:
        """Each way to begin the next call, before its first operation."""
        if here.calls >= self.setting.calls:
            return
        kind = self.setting.kinds[min(here.calls, len(self.setting.kinds) - 1)]
        if here.evicted and kind is Kind.RECONCILE:
            return
        standing = here.call.accused & here.adopted.mask
        last_step = max(here.call.last_step + 1, here.adopted.resume_step)
        others = here.adopted.mask & ~(1 << here.rank) & ~standing
        for more in subsets(others) if here.calls and self.setting.fresh else (0,):
            accused = standing | more if kind is Kind.RECONCILE else 0
            call = Call(kind, accused, last_step)
            state, operation = self._begin(self._members[here.rank], here.adopted, call, here.evicted, here.calls)
            yield replace(here, calls=here.calls + 1, call=call, state=state, operation=operation)

    def _beyond_horizon_or(self, here: Place, store: Store, crashed: int, operations: int) -> Iterable[Move]:
        """A rank whose next decision does not exist posts, or adopts what it read last; not beyond the horizon."""
        assert isinstance(here.operation, Read)
        if here.operation.number > self.setting.rounds:
            return ()
        return self._respond(here, store.decision(here.operation.number), store, crashed, "", operations + 1)

    def _respond(
        self, here: Place, response: Response, store: Store, crashed: int, words: str, operations: int, wrote: int = 0
    ) -> Iterator[Move]:
        assert here.state is not None
        state, operation = self._advance(here.state, response)
        moved = replace(here, state=state, operation=operation)
        yield from self._go_on(moved, store, crashed, words, operations, wrote)

    def _go_on(
        self, here: Place, store: Store, crashed: int, words: str, operations: int, wrote: int = 0
    ) -> Iterator[Move]:
        """From an operation not yet done to the next place where others may come between; checks what it does."""
        operation, state = here.operation, here.state
        assert state is not None
        if isinstance(operation, Read):
            decision = store.decision(operation.number)
            if decision is not None or state.phase is Phase.LEAVING:
                yield from self._respond(here, decision, store, crashed, words, operations + 1, wrote)
                return
        elif isinstance(operation, Post):
            if not here.evicted:
                check_told(here.rank, here.adopted.number, store.decided(), "posts")
            if self.setting.crashes:
                yield self._crash(here, store, "before it posts")
            posted = store.post(operation.number, operation.view)
            yield from self._respond(here, None, posted, crashed, f"{words} {does(operation)};", operations + 1, wrote)
            return
        elif isinstance(operation, (Done, Fail)):
            words += f" {does(operation)}"
            here = self._end(here, store)
        elif isinstance(operation, (Offer, Overwrite)):
            views = store.posted[operation.decision.number - 1]
            check_offer(state.last, views, operation.decision, crashed, self.setting.quorum)
        yield Move(here, store, f"rank {here.rank} {words.strip(' ;')}", operations, wrote)

    def _crash(self, here: Place, store: Store, words: str) -> Move:
        return Move(crashed_place(here.rank, self.setting.world), store, f"rank {here.rank} crashes {words}", 0)

    def _end(self, here: Place, store: Store) -> Place:
        """The rank after a call, whose end is checked."""
        outcome, call, history = here.operation, here.call, store.decided()
        if isinstance(outcome, Done):
            decision = outcome.decision
            if not here.evicted:
                upto = {number: each for number, each in history.items() if number <= decision.number}
                check_told(here.rank, here.adopted.number, upto, "ends a call")
            check_adopted(
                here.rank, decision, here.adopted.number, call.last_step, history, self.setting.world, self.setting.calm
            )
            call = replace(call, accused=0, last_step=max(call.last_step, decision.resume_step - 1))
            return Place(here.rank, here.calls, decision, False, call)
        assert isinstance(outcome, Fail)
        if self.setting.calm:
            raise Violation("b", f"rank {here.rank} {does(outcome)}")
        if outcome.failure is Failure.EVICTED:
            return Place(here.rank, here.calls, here.adopted, True, call)
        if not here.evicted:
            check_told(here.rank, here.adopted.number, history, "ends a call")
        return Place(here.rank, here.calls, here.adopted, here.evicted, call)


def _hears_of(operation: AnyOperation | None) -> int | None:
    """Number of the decision that this operation gives once it exists."""
    if isinstance(operation, Wait):
        return operation.number
    return operation.decision.number if isinstance(operation, Offer) else None
