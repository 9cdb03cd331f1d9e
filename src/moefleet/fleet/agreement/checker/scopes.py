"""What is searched: the quick scopes that the test suite runs, and the full ones of ``moefleet check-protocol``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..protocol import advance
from ..values import Kind
from .model import AgreementModel
from .moves import Moves
from .search import Counts, Violation, search
from .steps import StepModel, StepSetting
from .words import accusations
from .world import Advance, Begin, Graph, Setting, all_graphs, begin_call, named_graphs

Tick = Callable[[int], None]
READMISSION = (Kind.RECONCILE, Kind.READMIT)


@dataclass(frozen=True)
class Scope:
    """One model and the accusations to start it from (none for steps, which find their own)."""

    name: str
    setting: Setting | StepSetting
    graphs: tuple[Graph, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a search came to.

    Attributes:
        scope: its name.
        counts: states, transitions and seconds over all graphs.
        most_operations: most store operations of a call, where the model counts them.
        violation: the property that does not hold, or ``None``.
        start: the accusations that the violation starts from, in words.
    """

    scope: str
    counts: Counts
    most_operations: int | None = None
    violation: Violation | None = None
    start: str = ""

    @property
    def holds(self) -> bool:
        return self.violation is None


def check(
    scope: Scope, tick: Tick = lambda states: None, advance: Advance = advance, begin: Begin = begin_call
) -> Result:
    """Search a scope, under the protocol or a mutant of it, until it is done or a property does not hold.

    Args:
        scope: what to search.
        tick: called now and then with the number of states so far.
    """
    total, start = Counts(0, 0, 0.0), ""
    try:
        if isinstance(scope.setting, StepSetting):
            steps = StepModel(scope.setting, advance, begin)
            return Result(scope.name, search(steps, steps.start(), tick))
        model = AgreementModel(Moves(scope.setting, advance, begin))
        for graph in scope.graphs:
            start = accusations(graph)
            total += search(model, model.start(graph), partial(_tick_from, tick, total.states))
        return Result(scope.name, total, model.most_operations())
    except Violation as violation:
        return Result(scope.name, total, None, violation, start)


def _tick_from(tick: Tick, before: int, states: int) -> None:
    tick(before + states)


def _all(world: int) -> tuple[Graph, ...]:
    return tuple(all_graphs(world))


def _named(world: int) -> tuple[Graph, ...]:
    return tuple(named_graphs(world).values())


def _calm(world: int, rounds: int) -> Scope:
    setting = Setting(world, rounds, rounds, crashes=False, timeouts=False, calm=True)
    return Scope(f"{world} ranks, {rounds} rounds, nothing goes wrong", setting, ((0,) * world,))


QUICK = (
    Scope("2 ranks, 3 rounds, all accusations, then any", Setting(2, 3, 4, fresh=True), _all(2)),
    Scope("3 ranks, 1 round, all accusations", Setting(3, 1, 2), _all(3)),
    Scope("3 ranks, 2 rounds, named accusations", Setting(3, 2, 2), _named(3)),
    Scope("4 ranks, 1 round, named accusations", Setting(4, 1, 1), _named(4)),
    Scope("2 ranks, 3 rounds, readmission", Setting(2, 3, 4, kinds=READMISSION), _all(2)),
    Scope("3 ranks, 2 rounds, readmission", Setting(3, 2, 2, kinds=READMISSION), _named(3)),
    Scope("2 ranks, 2 rounds, any number decides", Setting(2, 2, 3, quorum="any"), _all(2)),
    _calm(2, 3),
    _calm(3, 2),
    Scope("2 ranks, 3 steps, 2 rounds", StepSetting(2, 3, 2, 2)),
    Scope("3 ranks, 1 step, 1 round", StepSetting(3, 1, 1, 1)),
)

FULL = (
    Scope("2 ranks, 3 rounds, all accusations, then any", Setting(2, 3, 4, fresh=True), _all(2)),
    Scope("3 ranks, 2 rounds, all accusations, then any", Setting(3, 2, 3, fresh=True), _all(3)),
    Scope("3 ranks, 3 rounds, named accusations", Setting(3, 3, 4), _named(3)),
    Scope("4 ranks, 1 round, all accusations", Setting(4, 1, 1), _all(4)),
    Scope("4 ranks, 2 rounds, named accusations", Setting(4, 2, 3), _named(4)),
    Scope("5 ranks, 1 round, named accusations", Setting(5, 1, 1), _named(5)),
    Scope("2 ranks, 4 rounds, readmission", Setting(2, 4, 5, kinds=READMISSION), _all(2)),
    Scope("3 ranks, 2 rounds, readmission", Setting(3, 2, 3, kinds=READMISSION), _all(3)),
    Scope("3 ranks, 3 rounds, readmission, then not", Setting(3, 3, 3, kinds=(*READMISSION, *READMISSION)), _named(3)),
    Scope("4 ranks, 2 rounds, readmission", Setting(4, 2, 2, kinds=READMISSION), _named(4)),
    Scope("3 ranks, 2 rounds, any number decides", Setting(3, 2, 2, quorum="any"), _all(3)),
    _calm(3, 3),
    _calm(4, 2),
    Scope("2 ranks, 4 steps, 3 rounds", StepSetting(2, 4, 3, 3)),
    Scope("3 ranks, 2 steps, 1 round", StepSetting(3, 2, 1, 1)),
    Scope("3 ranks, 1 step, 2 rounds", StepSetting(3, 1, 2, 2)),
)
