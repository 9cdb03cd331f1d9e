"""Sixty random rounds: kills, stops, late ranks, deaths while deciding, double faults, readmissions, replacements."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moefleet.chaos import run_rounds
from moefleet.chaos.report import Totals

ROUNDS = 30


def rounds_of(seed: int) -> list[dict[str, Any]]:
    return run_rounds(seed, ROUNDS, timeout_ms=400)


@pytest.mark.timeout(600)
def test_whatever_happens_no_wrong_row_leaves_and_ranks_agree() -> None:
    with ThreadPoolExecutor() as two:
        found = [each for rounds in two.map(rounds_of, (1, 2)) for each in rounds]
    bad = [each for each in found if not each["clean"]]
    assert not bad, json.dumps(bad, indent=1)
    totals = Totals.of(found)
    assert totals.rounds == 2 * ROUNDS and totals.rows > 100 * totals.rounds
    assert sum(each["recovered_s"] is not None for each in found) > totals.rounds / 2
