"""The protocol under the checker, its mutants, and the checker's own reductions."""

from __future__ import annotations

import random

import pytest

from moefleet.fleet.agreement.checker import MUTANTS, PROPERTIES, QUICK, Mutant, Scope, check
from moefleet.fleet.agreement.checker.model import AgreementModel
from moefleet.fleet.agreement.checker.moves import Moves
from moefleet.fleet.agreement.checker.scopes import READMISSION
from moefleet.fleet.agreement.checker.world import Graph, Setting, all_graphs
from moefleet.fleet.agreement.values import Kind

from .every_order import End, EveryOrder, held


@pytest.mark.parametrize("scope", QUICK, ids=lambda scope: scope.name)
def test_the_protocol_has_its_properties(scope: Scope) -> None:
    result = check(scope)
    assert result.holds, f"{result.violation}\n{result.start}\n" + "\n".join(result.violation.trace)
    assert result.counts.states > 1
    if result.most_operations is not None:
        world, rounds = scope.setting.world, scope.setting.rounds
        assert result.most_operations <= rounds * (6 + 2 * world), "reads, a post, an offer, and a look for each turn"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_caught(mutant: Mutant) -> None:
    result = mutant.search()
    assert mutant.is_caught_by(result), f"{result.violation}"
    assert result.violation is not None
    assert result.violation.trace


def test_every_property_has_a_mistake_that_breaks_it() -> None:
    assert {letter for mutant in MUTANTS for letter in mutant.breaks} == set(PROPERTIES)


def ends(setting: Setting, graph: Graph) -> set[End]:
    """The same as :meth:`EveryOrder.ends`, by the model that is searched."""
    model = AgreementModel(Moves(setting))
    todo, found = [model.start(graph)], set()
    seen = set(todo)
    while todo:
        node = todo.pop()
        after = model.successors(node)
        todo += [other for other in after if other not in seen]
        seen.update(after)
        if not after:
            store, places = model.values(node)
            found.add((store.history, tuple(map(held, places))))
    return found


@pytest.mark.parametrize(
    ("setting", "graphs"),
    [
        (Setting(2, 2, 3), 4),
        (Setting(2, 2, 2, fresh=True), 4),
        (Setting(2, 2, 3, kinds=READMISSION), 4),
        (Setting(2, 2, 2, kinds=(Kind.READMIT,)), 1),
        (Setting(3, 1, 1), 3),
        (Setting(3, 1, 2, quorum="any"), 2),
    ],
    ids=str,
)
def test_the_orders_left_out_lead_nowhere_else(setting: Setting, graphs: int) -> None:
    for graph in random.Random(graphs).sample(all_graphs(setting.world), graphs):
        assert ends(setting, graph) == EveryOrder(setting).ends(graph), graph
