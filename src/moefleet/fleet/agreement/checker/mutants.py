"""Mistakes that the checker has to find: the protocol with one thing wrong, and the property that breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..protocol import Call, Done, Member, Offer, Phase, Response, State, Step, Woken, advance, begin
from ..values import Decision, everybody
from .scopes import READMISSION, Result, Scope, check
from .steps import StepSetting
from .world import Advance, AnyOperation, Begin, Overwrite, Setting, all_graphs, begin_call


@dataclass(frozen=True)
class Mutant:
    """A protocol with a mistake.

    Attributes:
        name: what is wrong.
        breaks: the properties of which one must be found broken.
        scope: where to look.
        advance, begin: the protocol with the mistake.
    """

    name: str
    breaks: str
    scope: Scope
    advance: Advance = advance
    begin: Begin = begin_call

    def search(self, tick: Callable[[int], None] = lambda states: None) -> Result:
        """Search for the violation that must be there."""
        return check(self.scope, tick, self.advance, self.begin)

    def is_caught_by(self, result: Result) -> bool:
        """Whether a property that this mutant breaks was found broken."""
        return result.violation is not None and result.violation.prop in self.breaks


def _count_own_calls(member: Member, adopted: Decision, call: Call, evicted: bool, calls: int) -> Step:
    """Number rounds by one's own calls."""
    return begin(member, replace(adopted, number=calls), call, evicted=evicted)


def _alone(member: Member, adopted: Decision, call: Call, evicted: bool, calls: int) -> Step:
    """Decide with whoever is there."""
    return begin(replace(member, quorum="any"), adopted, call, evicted=evicted)


def _overwrite(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Offer without comparing."""
    state, operation = advance(state, response)
    return state, Overwrite(operation.decision) if isinstance(operation, Offer) else operation


def _masking_takeover(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Whoever takes over masks those whose turn it was."""
    state, operation = advance(state, response)
    if isinstance(operation, Offer):
        rank, mask = state.member.rank, operation.decision.mask
        operation = Offer(replace(operation.decision, mask=mask >> rank << rank))
    return state, operation


def _ignore_eviction(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Do not notice that a decision read on entering masks oneself."""
    if state.phase is Phase.READING and isinstance(response, Decision):
        response = replace(response, mask=response.mask | 1 << state.member.rank)
    return advance(state, response)


def _adopt_old_steps(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Adopt a decision although it resumes at a step that this rank has begun."""
    if not isinstance(response, Decision) or response.resume_step > state.call.last_step:
        return advance(state, response)
    state, operation = advance(state, replace(response, resume_step=state.call.last_step + 1))
    return state, Done(response) if isinstance(operation, Done) else operation


def _do_not_wait(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Decide as soon as enough have posted."""
    if state.phase is Phase.LOOKING:
        state = replace(state, phase=Phase.JUDGING)
    return advance(state, response)


def _wait_for_ever(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Begin the wait again when its time is over."""
    return advance(state, Woken.LOOK if response is Woken.EXPIRED else response)


def _readmit_all(state: State, response: Response) -> tuple[State, AnyOperation]:
    """Readmit those as well who did not come."""
    state, operation = advance(state, response)
    if isinstance(operation, Offer) and operation.decision.kind is READMISSION[1]:
        operation = Offer(replace(operation.decision, mask=everybody(state.member.world)))
    return state, operation


def _scope(world: int, rounds: int, calls: int, **setting: object) -> Scope:
    graphs = tuple(all_graphs(world)) if world < 3 else ((0,) * world,)
    return Scope(f"{world} ranks, {rounds} rounds", Setting(world, rounds, calls, **setting), graphs)  # type: ignore[arg-type]


_STEPS = StepSetting(2, 2, 1, 2)

MUTANTS = (
    Mutant("local round counters", "cd", _scope(3, 2, 2), begin=_count_own_calls),
    Mutant("no compare-and-set", "c", _scope(3, 1, 1), advance=_overwrite),
    Mutant("an accepted minority", "e", _scope(2, 1, 1), begin=_alone),
    Mutant("a takeover that masks", "a", _scope(2, 1, 1), advance=_masking_takeover),
    Mutant("prior eviction ignored", "d", _scope(2, 2, 2), advance=_ignore_eviction),
    Mutant("steps run again", "g", _scope(3, 1, 2), advance=_adopt_old_steps),
    Mutant("no waiting for all", "b", _scope(3, 1, 1, crashes=False, timeouts=False, calm=True), advance=_do_not_wait),
    Mutant("waits that begin again", "f", _scope(2, 1, 1), advance=_wait_for_ever),
    Mutant("absentees readmitted", "a", _scope(3, 2, 2, kinds=READMISSION), advance=_readmit_all),
    Mutant(
        "local round counters, with steps",
        "cd",
        Scope("steps", StepSetting(3, 1, 2, 2)),
        begin=_count_own_calls,
    ),
    Mutant("a round frees nobody", "h", Scope("steps", replace(_STEPS, heeds_rounds=False))),
    Mutant("later rounds go unnoticed", "h", Scope("steps", replace(_STEPS, heeds_later=False))),
    Mutant("flags without headers", "g", Scope("steps", replace(_STEPS, reads_headers=False))),
)
