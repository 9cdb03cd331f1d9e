"""All cases of a run, of which those that its JSON file has already are not measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from ..launch.torchrun import first_says
from .notebook import Notebook
from .records import Record, record_of


class Plan(Protocol):
    """What :class:`~moefleet.bench.comm.CommPlan` and :class:`~moefleet.bench.model.ModelPlan` have in common."""

    @property
    def cases(self) -> Sequence[Any]: ...

    @property
    def validate(self) -> bool: ...

    def names(self, case: Any) -> list[str]: ...

    def facts(self, case: Any) -> dict[str, Any]: ...


P = TypeVar("P", bound=Plan)
Known: TypeAlias = Sequence[Sequence[Record]]
"""For each case of a plan its records; none where it has to be measured."""


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


def begin(plan: Plan, path: Path | None, *, resume: bool) -> tuple[Notebook, Known]:
    """Open the notebook of a run, and find what it has.

    Under torchrun the first rank alone reads and writes the file, and tells the others what it found, so that all
    measure the same cases; theirs is in memory.

    Args:
        path, resume: as for :class:`Notebook`.

    Raises:
        MoEEpConfigError: as there, on all ranks.
    """
    notebook = Notebook()

    def read() -> list[list[dict[str, Any]]]:
        nonlocal notebook
        notebook = Notebook(path, resume=resume)
        return [[asdict(record) for record in of_case] for of_case in find(plan, notebook)]

    found = first_says(read)
    return notebook, [[record_of(fields) for fields in of_case] for of_case in found]


def find(plan: Plan, notebook: Notebook) -> Known:
    """What the notebook has of each case of a plan."""
    return [_known(plan, case, notebook) for case in plan.cases]


def remaining(plan: P, known: Known) -> P:
    """The plan with the cases that have to be measured."""
    return replace(plan, cases=[case for case, of_case in zip(plan.cases, known) if not of_case])  # type: ignore[type-var]


def run(
    plan: P,
    notebook: Notebook,
    known: Known,
    measure: Callable[[P, Callable[[Any], None]], Iterator[Any]],
    records: Callable[[P, Any], list[Record]],
    on_tick: Callable[[Any], None] = lambda case: None,
) -> Outcome:
    """Fill the notebook case by case; in the end it has the records of all cases, in their order, and no others.

    Args:
        known: what is not measured again.
        measure: yields the results of a plan's cases one by one.
        records: of a result.
        on_tick: called as the plan that is left says by its ``ticks``.
    """
    outcome = Outcome()
    results = measure(remaining(plan, known), on_tick)
    notebook.replace([record for of_case in known for record in of_case])
    for of_case in known:
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
