"""What must hold in every run, whatever crashes, is late, or accuses whom.

a. A rank that a decision masks had not posted when the offerer's wait ended, or is dead, or stands in an accusation,
   on either side, with another active rank that posted. Only those that posted come back.
b. Without crash, accusation and time-out every call ends with all ranks active.
c. Adopted decisions are prefixes of one history: equal at each number, without a gap, never rewritten.
d. A live rank that is masked gets the eviction error from its next call: no call posts or ends in another way while
   the history masks its rank.
e. Every decision rests on a quorum, and keeps only ranks that posted and at least one of them. So if nobody alive is
   active, then all whom the last decision kept crashed after they had posted.
f. The operations of one call are bounded, save for looks that find nothing new, which the clock bounds.
g. A decision resumes past every step that its posters began, and past every step that whoever adopts it began.

Two of these say less, and two more, than one might wish at first. (a) cannot be "was accused": a rank that accuses all
others goes without being accused by anybody. Nor can its partner in the accusation be required to survive: that one may
be masked later in the same decision. (e) cannot be "somebody alive is active" after a crash: of three ranks two may
go on without a third that is late, and then die. (e) asks for the quorum as well, which is what keeps a few ranks from
shutting out the others. (g) is not about masks at all, but flags of steps are never reset, so a step number must not
come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..protocol import Quorum
from ..values import Decision, Kind, View, bit_set, everybody, members
from .search import Violation
from .words import decided, names

PROPERTIES = {
    "a": "nobody is masked without a reason",
    "b": "without a fault all stay active",
    "c": "one history",
    "d": "a masked rank is told by its next call",
    "e": "a decision rests on a quorum and keeps somebody",
    "f": "the operations of a call are bounded",
    "g": "steps never come back",
    "h": "nobody needs a time-out to get on (see steps)",
}


def check_offer(last: Decision, views: Sequence[View], decision: Decision, crashed: int, quorum: Quorum) -> None:
    """(a), (e), (g) for an offer at the moment its offerer's wait ended, with these views posted."""
    posted, active = bit_set(view.rank for view in views), last.mask
    says = {view.rank: view.accused for view in views if active >> view.rank & 1}
    for rank in members(active & ~decision.mask & posted & ~crashed):
        others = posted & active & ~(1 << rank)
        accusers = bit_set(other for other, accused in says.items() if accused >> rank & 1) & others
        if not accusers and not says[rank] & others:
            raise Violation("a", f"decision {decision.number} masks rank {rank}, which posted and has no quarrel")
    if decision.mask & ~active & ~posted:
        raise Violation("a", f"decision {decision.number} brings back ranks {names(decision.mask & ~active & ~posted)}")
    kept = decision.mask & posted
    if not kept or (decision.kind is Kind.RECONCILE and kept != decision.mask):
        raise Violation("e", f"decision {decision.number} keeps {names(decision.mask)} where {names(posted)} posted")
    spoke, lacking = posted & active, active & ~posted
    enough = 2 * spoke.bit_count() > active.bit_count()
    half = 2 * spoke.bit_count() == active.bit_count() and spoke & (active & -active)
    if quorum != "any" and not enough and not half and lacking & ~crashed:
        raise Violation(
            "e", f"decision {decision.number} rests on {names(spoke)} alone, of {names(active)}; {names(lacking)} live"
        )
    if decision.resume_step <= max(view.step for view in views) or decision.resume_step < last.resume_step:
        raise Violation("g", f"decision {decision.number} resumes at {decision.resume_step}, a step that has begun")


def check_told(rank: int, adopted: int, history: Mapping[int, Decision], what: str) -> None:
    """(d) for a rank that has adopted decision ``adopted`` and now posts, or ends a call without an eviction."""
    for number in range(adopted + 1, max(history, default=0) + 1):
        if number in history and not history[number].mask >> rank & 1:
            raise Violation("d", f"rank {rank} {what} although decision {number} masks it")


def check_adopted(
    rank: int, decision: Decision, adopted: int, last_step: int, history: Mapping[int, Decision], world: int, calm: bool
) -> None:
    """(b), (c), (d), (g) for a rank that adopts a decision, having adopted ``adopted`` before."""
    number = decision.number
    if number <= adopted or any(earlier not in history for earlier in range(1, number)):
        raise Violation("c", f"rank {rank} adopts decision {number} after {adopted}; decided are {sorted(history)}")
    if history.get(number) != decision:
        raise Violation("c", f"rank {rank} adopts another decision {number} than the history holds")
    if not decision.mask >> rank & 1:
        raise Violation("d", f"rank {rank} adopts decision {number}, which masks it")
    if decision.resume_step <= last_step:
        raise Violation("g", f"rank {rank} began step {last_step} and adopts {decided(decision)}")
    if calm and decision.mask != everybody(world):
        raise Violation("b", f"decision {number} keeps only {names(decision.mask)}")


def check_once(before: Decision | None, now: Decision) -> None:
    """(c) for a decision about to be written."""
    if before is not None and before != now:
        raise Violation("c", f"decision {now.number} is rewritten: {decided(before)} becomes {decided(now)}")
