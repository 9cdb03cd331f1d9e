"""The agreement as a pure function: ``advance(state, response) -> (state, operation)``.

A rank that calls does the operation it is given, hands the response back, and so on until the operation is ``Done`` or
``Fail``. :mod:`.driver` does them on a real store and clock, :mod:`.checker` in every order there is.

The store holds a history of decisions, each written once by compare-and-set, and for each round the views posted in
it. Round ``n`` is the one that makes decision ``n``, so its number comes from the history, never from a count of one's
own.

1. Read every decision after the last adopted one. One that masks us ends the call. If the last of them settles what we
   came for, adopt it.
2. Else post a view for the next round, and wait until all whom the last decision left active have posted or are
   proven dead, or the round's time is over. If enough have posted, the lowest rank that did offers what
   :func:`~.deciding.decide` makes of the views; if it does not within its turn, the next one does.
3. Whatever the history then holds is treated as in 1.

What "settles" means goes beyond "no accusation is left over". A view may be used while its rank is elsewhere: it
posted, ran out of time, went on with more steps, and only then was the round decided, with a ``resume_step`` that this
rank has passed. Adopting it would let flags of old steps pass for new ones, so such a decision settles nothing and the
rank takes part in the next round. For the same reason ``resume_step`` never goes back from one decision to the next.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from .deciding import decide, has_quorum, missing, turn_of
from .values import Decision, Kind, View

Quorum = Literal["majority", "any"]


@dataclass(frozen=True)
class Member:
    """One rank of a fleet: what stays the same through all its calls."""

    rank: int
    world: int
    quorum: Quorum = "majority"
    incarnation: int = 0


@dataclass(frozen=True)
class Call:
    """What a rank brings to one call.

    Attributes:
        kind: what it wants.
        accused: ranks that it gave up on; none for a readmission, which forgives.
        last_step: the last step that it began, -1 before the first.
    """

    kind: Kind
    accused: int = 0
    last_step: int = -1


@dataclass(frozen=True)
class Read:
    """Read decision ``number``. Response: the :class:`Decision`, or ``None`` where there is none yet."""

    number: int


@dataclass(frozen=True)
class Post:
    """Post a view in round ``number``, in place of an earlier one of this rank. Response: ``None``."""

    number: int
    view: View


@dataclass(frozen=True)
class Wait:
    """Wait for decision ``number``. Response: the :class:`Decision`, or a :class:`Woken`.

    Attributes:
        number: the decision.
        turn: ``None`` while views are gathered (the round's time runs), else which turn to offer it is (a time each).
        active: whose views are waited for; the lowest of these that lives does well to look at the views often.
    """

    number: int
    turn: int | None
    active: int


class Woken(enum.Enum):
    """Why a wait ended without its decision."""

    LOOK = "time to look at the views again"
    EXPIRED = "the time of this wait is over"


@dataclass(frozen=True)
class ReadViews:
    """Read what is posted in round ``number``. Response: :class:`Views`."""

    number: int


@dataclass(frozen=True)
class Views:
    """The views of a round, one per rank, lowest first; and the ranks that are proven dead by now."""

    views: tuple[View, ...]
    dead: int = 0


@dataclass(frozen=True)
class Offer:
    """Write this decision unless one of its number exists. Response: the one that the history then holds."""

    decision: Decision


@dataclass(frozen=True)
class Done:
    """The call is over: this decision is adopted."""

    decision: Decision


class Failure(enum.Enum):
    """Why a call ends without a mask."""

    EVICTED = "evicted"
    NO_QUORUM = "no quorum"


@dataclass(frozen=True)
class Fail:
    """The call is over and the mask unchanged.

    Attributes:
        failure: why.
        decision: the decision that masks us, or the last one before the round that failed.
        ranks: for want of a quorum, the ranks that did not post.
    """

    failure: Failure
    decision: Decision
    ranks: int = 0


Operation: TypeAlias = Read | Post | Wait | ReadViews | Offer | Done | Fail
Response: TypeAlias = Decision | Woken | Views | None


class Phase(enum.Enum):
    """Which operation's response a state expects."""

    READING = "the next decision of the history"
    POSTING = "that the view is posted"
    WAITING = "the decision of this round, or a reason to look"
    LOOKING = "the views, to see whether all are there"
    JUDGING = "the views, the time being over"
    OFFERING = "what the history holds after the offer"
    LEAVING = "whether there is a decision after all, before failing"
    OVER = "nothing"


@dataclass(frozen=True)
class State:
    """Where a rank is in one call.

    Attributes:
        member, call: who, and what for.
        adopted: the last decision that this rank adopted.
        evicted: whether it has been told that it is masked.
        last: the last decision read; the round to come is one after it.
        phase: what it waits for.
        turn: ``None`` while views are gathered, else how many turns to offer have passed.
        lacking: ranks without a view when the time was over, for the error.
    """

    member: Member
    call: Call
    adopted: Decision
    evicted: bool
    last: Decision
    phase: Phase
    turn: int | None = None
    lacking: int = 0


Step: TypeAlias = tuple[State, Operation]


def begin(member: Member, adopted: Decision, call: Call, *, evicted: bool = False) -> Step:
    """Enter a call, having adopted ``adopted`` last. An evicted rank may only come to be readmitted."""
    assert not (evicted and call.kind is Kind.RECONCILE), "an evicted rank has nothing to reconcile"
    return _read_on(State(member, call, adopted, evicted, adopted, Phase.READING))


def advance(state: State, response: Response) -> Step:
    """Take the response to the state's operation; return the state after it and the operation to do next."""
    phase = state.phase
    if phase is Phase.READING or phase is Phase.LEAVING:
        assert response is None or isinstance(response, Decision)
        if response is not None:
            return _heed(state, response)
        if phase is Phase.LEAVING:
            return _over(state), Fail(Failure.NO_QUORUM, state.last, state.lacking)
        if state.last.number > state.adopted.number and _settles(state, state.last):
            return _over(state), Done(state.last)
        return _post(state)
    if phase is Phase.POSTING:
        return _wait(state, None)
    if phase is Phase.WAITING:
        if isinstance(response, Decision):
            return _heed(state, response)
        looking = Phase.JUDGING if response is Woken.EXPIRED else Phase.LOOKING
        return replace(state, phase=looking), ReadViews(state.last.number + 1)
    if phase is Phase.OFFERING:
        assert isinstance(response, Decision)
        return _heed(state, response)
    assert phase in (Phase.LOOKING, Phase.JUDGING) and isinstance(response, Views), (phase, response)
    return _judge(state, response, expired=phase is Phase.JUDGING)


def _heed(state: State, decision: Decision) -> Step:
    """Take in the next decision of the history: eviction first; then adopt it, or read on."""
    masked = not decision.mask >> state.member.rank & 1
    if masked and not state.evicted:
        return _over(state), Fail(Failure.EVICTED, decision)
    came_while_waiting = state.phase is not Phase.READING
    state = replace(state, last=decision)
    if came_while_waiting and _settles(state, decision):
        return _over(state), Done(decision)
    return _read_on(state)


def _settles(state: State, decision: Decision) -> bool:
    """Whether a call is done with this decision: we are in it, it lacks no accusation of ours nor a step we began."""
    if not decision.mask >> state.member.rank & 1 or decision.resume_step <= state.call.last_step:
        return False
    if state.call.kind is Kind.READMIT:
        return decision.kind is Kind.READMIT
    return not state.call.accused & decision.mask


def _read_on(state: State) -> Step:
    return replace(state, phase=Phase.READING, turn=None), Read(state.last.number + 1)


def _post(state: State) -> Step:
    call, member, last = state.call, state.member, state.last
    step = max(call.last_step, last.resume_step - 1)
    view = View(member.rank, call.accused & last.mask, step, member.incarnation, call.kind)
    return replace(state, phase=Phase.POSTING), Post(last.number + 1, view)


def _wait(state: State, turn: int | None) -> Step:
    return replace(state, phase=Phase.WAITING, turn=turn), Wait(state.last.number + 1, turn, state.last.mask)


def _judge(state: State, seen: Views, expired: bool) -> Step:
    """Go on waiting, or end the gathering; then offer in our turn, or leave if too few have spoken."""
    views, dead, active, member = seen.views, seen.dead, state.last.mask, state.member
    lacking = missing(views, active, member.world)
    turn = state.turn
    if turn is not None:
        turn += expired
    elif expired or not lacking & ~dead:
        turn = 0
    else:
        return _wait(state, None)
    if not has_quorum(views, active, dead, member.quorum):
        return replace(state, phase=Phase.LEAVING, turn=None, lacking=lacking & active), Read(state.last.number + 1)
    if turn < turn_of(member.rank, views, active, dead):
        return _wait(state, turn)
    return replace(state, phase=Phase.OFFERING, turn=None), Offer(decide(state.last, views))


def _over(state: State) -> State:
    return replace(state, phase=Phase.OVER, turn=None, lacking=0)
