"""Random rounds: kills, stops, late ranks, deaths while deciding, double faults, readmissions, replacements."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moefleet.chaos import Plan, Recovery, random_plan, run_rounds
from moefleet.chaos.report import Totals
from moefleet.config import EpLayout

SEEDS, ROUNDS, WORLD, TIMEOUT_MS = (1, 2), 16, 4, 400
KINDS = {
    "kill", "term", "stop", "stop for a while", "kill, kill", "kill, stop", "kill, kill while deciding",
    "stop, kill while deciding",
}  # fmt: skip


def rounds_of(seed: int) -> list[dict[str, Any]]:
    return run_rounds(seed, ROUNDS, WORLD, TIMEOUT_MS)


def kind_of(plan: Plan) -> str:
    return ", ".join(
        fault.kind.value + " for a while" * (fault.seconds is not None) + " while deciding" * fault.while_deciding
        for fault in plan.faults
    )


def test_rounds_are_of_all_kinds() -> None:
    plans = [random_plan(seed, number, WORLD, TIMEOUT_MS) for seed in SEEDS for number in range(ROUNDS)]
    kinds, layouts = Counter(map(kind_of, plans)), Counter(plan.layout for plan in plans)
    recoveries = Counter(plan.recovery for plan in plans if plan.ended)
    assert kinds.keys() == KINDS and min(kinds.values()) >= 2, kinds
    assert layouts.keys() == {*EpLayout} and min(layouts.values()) >= 8, layouts
    assert recoveries.keys() == {*Recovery} and min(recoveries.values()) >= 5, recoveries


@pytest.mark.timeout(600)
def test_whatever_happens_no_wrong_row_leaves_and_ranks_agree() -> None:
    with ThreadPoolExecutor() as two:
        found = [each for rounds in two.map(rounds_of, SEEDS) for each in rounds]
    bad = [each for each in found if not each["clean"]]
    assert not bad, json.dumps(bad, indent=1)
    totals = Totals.of(found)
    assert totals.rounds == len(SEEDS) * ROUNDS and totals.rows > 100 * totals.rounds
    assert sum(each["recovered_s"] is not None for each in found) > totals.rounds / 2
