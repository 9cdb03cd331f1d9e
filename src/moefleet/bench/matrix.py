"""All cases of a run, of which those that its JSON file has already are not measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from .notebook import Notebook
from .records import Record


class Plan(Protocol):
    """What :class:`~moefleet.bench.comm.CommPlan` and :class:`~moefleet.bench.model.ModelPlan` have in common."""

    @property
    def cases(self) -> Sequence[Any]: ...

    @property
    def validate(self) -> bool: ...

    def names(self, case: Any) -> list[str]: ...

    def facts(self, case: Any) -> dict[str, Any]: ...


P = TypeVar("P", bound=Plan)


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        records: of all cases, in their order.
        left_out: (candidate, reason) of those that could not run a case.
        complaints: what to tell of wrong output.
        reused: cases whose records were there already.
    """

    records: list[Record] = field(default_factory=list)
    left_out: set[tuple[str, str]] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    reused: int = 0


def remaining(plan: P, notebook: Notebook) -> P:
    """The plan with the cases that the notebook does not have."""
    return replace(plan, cases=[case for case in plan.cases if not _known(plan, case, notebook)])  # type: ignore[type-var]


def run(
    plan: P,
    notebook: Notebook,
    measure: Callable[[P, Callable[[Any], None]], Iterator[Any]],
    records: Callable[[P, Any], list[Record]],
    on_tick: Callable[[Any], None] = lambda case: None,
) -> Outcome:
    """Fill the notebook case by case; in the end it has the records of all cases, in their order, and no others.

    Args:
        measure: yields the results of a plan's cases one by one.
        records: of a result.
        on_tick: called as the plan that is left says by its ``ticks``.
    """
    outcome = Outcome()
    kept = {number: _known(plan, case, notebook) for number, case in enumerate(plan.cases)}
    results = measure(remaining(plan, notebook), on_tick)
    notebook.replace([record for of_case in kept.values() for record in of_case])
    for of_case in kept.values():
        if of_case:
            outcome.reused += 1
            wrong = sorted({record.transport for record in of_case if record.valid is False})
            outcome.complaints += [f"{name}: wrong output in a case measured before" for name in wrong]
        else:
            result = next(results)
            of_case = records(plan, result)
            notebook.add(of_case)
            outcome.left_out |= set(result.left_out.items())
            outcome.complaints += result.complaints
        outcome.records += of_case
    for _ in results:  # lets it end its ranks
        pass
    notebook.replace(outcome.records)
    return outcome


def _known(plan: Plan, case: Any, notebook: Notebook) -> list[Record]:
    """The records of a case; none where it has to be measured, or measured again with validation."""
    found = notebook.find(plan.facts(case), plan.names(case))
    return found if not plan.validate or any(record.valid is not None for record in found) else []
