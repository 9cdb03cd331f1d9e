"""What a round decides from its views."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from moefleet.fleet.agreement.checker.world import all_graphs, named_graphs, subsets
from moefleet.fleet.agreement.deciding import decide, has_quorum, missing, reconcile, round_kind, turn_of
from moefleet.fleet.agreement.values import Decision, Kind, View, everybody, first_decision, members

ORACLE = Path(__file__).resolve().parents[4] / "shared" / "oracle" / "oracle.py"


def view(rank: int, accused: int = 0, step: int = 0, kind: Kind = Kind.RECONCILE) -> View:
    return View(rank, accused, step, 0, kind)


def in_words(accusations: dict[int, int], reported: int) -> int:
    """The rule read aloud, with sets of pairs."""
    left = set(members(reported))
    while True:
        pairs = [(a, b) for a, b in product(left, left) if a != b and accusations.get(a, 0) >> b & 1]
        if not pairs:
            return sum(1 << rank for rank in left)
        left.remove(max(left, key=lambda r: (sum(r in pair for pair in pairs), sum(r == b for _, b in pairs), r)))


@pytest.fixture(params=["in words", "oracle"])
def definition(request: pytest.FixtureRequest) -> Callable[[dict[int, int], int, int], int]:
    if request.param == "in words":
        return lambda accusations, reported, world: in_words(accusations, reported)
    if not ORACLE.is_file():
        pytest.skip("no oracle here")
    spec = importlib.util.spec_from_file_location("oracle", ORACLE)
    assert spec is not None and spec.loader is not None
    oracle: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)

    def ask(accusations: dict[int, int], reported: int, world: int) -> int:
        views = [[1 - (accusations.get(a, 0) >> b & 1) for b in range(world)] for a in range(world)]
        mask = oracle.reconcile(views, set(members(reported)))
        return sum(bit << rank for rank, bit in enumerate(mask))

    return ask


def test_reconcile_is_the_definition_on_every_graph_of_few_ranks(definition: Callable[..., int]) -> None:
    for world in (1, 2, 3):
        for graph in all_graphs(world):
            for reported in subsets(everybody(world)):
                accusations = dict(enumerate(graph))
                assert reconcile(accusations, reported) == definition(accusations, reported, world), (graph, reported)


def test_reconcile_is_the_definition_on_random_graphs_of_many_ranks(definition: Callable[..., int]) -> None:
    generator = random.Random(0)
    for _ in range(300):
        world = generator.randint(4, 12)
        density = generator.choice((0.1, 0.3, 0.7))
        graph = {r: sum((generator.random() < density) << o for o in range(world)) for r in range(world)}
        reported = generator.getrandbits(world) | generator.getrandbits(world)
        assert reconcile(graph, reported) == definition(graph, reported, world), (graph, reported)


def test_reconcile_leaves_somebody_and_no_quarrel() -> None:
    for graph in named_graphs(256).values():
        left = reconcile(dict(enumerate(graph)), everybody(256))
        assert left
        assert not any(graph[rank] & left & ~(1 << rank) for rank in members(left))


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("none", 0b1111),
        ("one victim", 0b1011),
        ("all accuse one", 0b1011),
        ("one accuses all", 0b1110),
        ("mutual pair", 0b1101),
        ("chain", 0b1001),
    ],
)
def test_the_shapes_that_accusations_mostly_have(graph: str, expected: int) -> None:
    assert reconcile(dict(enumerate(named_graphs(4)[graph])), 0b1111) == expected


def test_a_view_that_names_its_own_rank_or_an_absent_one_changes_nothing() -> None:
    assert reconcile({0: 0b0101, 1: 0}, 0b0011) == 0b0011


@pytest.mark.parametrize(
    ("active", "posted", "dead", "rule", "expected"),
    [
        (0b111, 0b011, 0, "majority", True),
        (0b111, 0b100, 0, "majority", False),
        (0b111, 0b100, 0b011, "majority", True),
        (0b111, 0b100, 0b001, "majority", False),
        (0b111, 0b100, 0, "any", True),
        (0b1111, 0b0011, 0, "majority", True),  # half, with the lowest
        (0b1111, 0b1100, 0, "majority", False),  # half, without it
        (0b1110, 0b0110, 0, "majority", True),
        (0b110, 0b010, 0, "majority", True),  # the lowest of those active
        (0b110, 0b101, 0, "majority", False),  # a masked rank's view does not count
    ],
)
def test_quorum(active: int, posted: int, dead: int, rule: str, expected: bool) -> None:
    assert has_quorum([view(rank) for rank in members(posted)], active, dead, rule) is expected


def test_an_active_rank_that_reconciles_makes_the_round_one_of_reconciliation() -> None:
    readmit = [view(rank, kind=Kind.READMIT) for rank in range(3)]
    assert round_kind(readmit, 0b011) is Kind.READMIT
    assert round_kind([view(0), *readmit[1:]], 0b011) is Kind.RECONCILE
    assert missing(readmit[:1], 0b011, 4) == 0b1110, "a readmission waits for masked ranks too"
    assert missing([view(0), readmit[2]], 0b011, 4) == 0b0010


def test_turns_go_by_rank_those_masked_last_and_the_dead_not_at_all() -> None:
    views = [view(rank) for rank in (0, 2, 3, 5)]
    assert [turn_of(rank, views, 0b101100, 0) for rank in (2, 3, 5, 0)] == [0, 1, 2, 3]
    assert turn_of(5, views, 0b101100, 0b000100) == 1


def test_deciding_masks_the_absent_and_resumes_past_every_step() -> None:
    last = Decision(4, Kind.RECONCILE, 0b1011, 7)
    decision = decide(last, [view(0, step=8), view(2, step=9), view(3, accused=0b0100, step=11)])
    assert decision == Decision(5, Kind.RECONCILE, 0b1001, 12)


def test_resuming_never_goes_back() -> None:
    assert decide(Decision(1, Kind.RECONCILE, 0b1, 9), [view(0, step=3)]).resume_step == 9


def test_readmitting_adds_who_came_and_keeps_who_did_not() -> None:
    last = Decision(1, Kind.RECONCILE, 0b0011, 3)
    views = [view(0, step=5, kind=Kind.READMIT), view(3, step=2, kind=Kind.READMIT)]
    assert decide(last, views) == Decision(2, Kind.READMIT, 0b1011, 6)


def test_256_ranks_that_all_accuse_one_another_are_few_steps() -> None:
    views = [view(rank, accused=everybody(256)) for rank in range(256)]
    assert decide(first_decision(256), views).mask == 1
