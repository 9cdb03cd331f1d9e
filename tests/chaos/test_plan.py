"""Plans: what options mean, what is refused, and that random ones follow from their seed."""

from __future__ import annotations

from collections import Counter

import pytest

from moefleet.chaos import Fault, Kind, Plan, random_plan
from moefleet.chaos.plan import parse_ranks, parse_stop
from moefleet.errors import MoEEpConfigError


def test_options_become_faults() -> None:
    assert parse_ranks("1,2") == [1, 2]
    assert parse_stop("3") == Fault(Kind.STOP, 3)
    assert parse_stop("3:0.5") == Fault(Kind.STOP, 3, seconds=0.5)


@pytest.mark.parametrize("text", ["", "a", "1,", "1;2"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(MoEEpConfigError, match="separated by commas"):
        parse_ranks(text)


@pytest.mark.parametrize("text", ["x", "1:soon", "1:-2", "1:0", "1:nan"])
def test_stops_that_are_none(text: str) -> None:
    with pytest.raises(MoEEpConfigError, match="--stop"):
        parse_stop(text)


def test_a_plan_leaves_somebody() -> None:
    with pytest.raises(MoEEpConfigError, match="fewer than the 2 ranks"):
        Plan(2, (Fault(Kind.KILL, 0), Fault(Kind.STOP, 1)))
    with pytest.raises(MoEEpConfigError, match="one for each victim"):
        Plan(4, (Fault(Kind.KILL, 0), Fault(Kind.STOP, 0)))
    with pytest.raises(MoEEpConfigError, match="ranks 0 to 3"):
        Plan(4, (Fault(Kind.KILL, 4),))


def test_random_plans_follow_from_seed_and_number() -> None:
    assert random_plan(1, 5, 4, 500) == random_plan(1, 5, 4, 500)
    assert len({random_plan(1, number, 4, 500) for number in range(50)}) == 50


@pytest.mark.parametrize("world", [2, 3, 5])
def test_random_plans_are_of_all_kinds_and_victims(world: int) -> None:
    plans = [random_plan(3, number, world, 500) for number in range(300)]
    kinds = Counter(" ".join(fault.kind.value for fault in plan.faults) for plan in plans)
    assert {"kill", "term", "stop"} <= kinds.keys()
    assert {rank for plan in plans for rank in plan.victims} == set(range(world))
    if world > 2:
        assert {"kill kill", "kill stop", "stop kill"} <= kinds.keys()
        assert any(fault.while_deciding for plan in plans for fault in plan.faults)
