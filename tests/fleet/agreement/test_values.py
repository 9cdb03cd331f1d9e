"""Views and decisions as values and as text."""

from __future__ import annotations

import pytest

from moefleet.fleet.agreement.values import (
    Decision,
    Kind,
    View,
    bit_set,
    decode_decision,
    decode_views,
    encode_decision,
    encode_view,
    first_decision,
    mask_list,
    members,
)

VIEWS = (View(0, 0, -1, 0, Kind.RECONCILE), View(255, 1 << 254 | 1, 10**12, 2**62 - 1, Kind.READMIT))


def test_a_log_gives_the_last_view_of_each_rank_lowest_first() -> None:
    earlier = View(255, 0, 3, 1, Kind.RECONCILE)
    log = "".join(map(encode_view, (earlier, *reversed(VIEWS))))
    assert decode_views(log) == VIEWS


@pytest.mark.parametrize("log", ["nonsense;", "1 2 3;", "0 0 0 0 maybe;"])
def test_other_text_is_no_log(log: str) -> None:
    with pytest.raises(ValueError):
        decode_views(log)


@pytest.mark.parametrize("decision", [first_decision(1), Decision(7, Kind.READMIT, 1 << 255 | 5, 12345)])
def test_decisions_survive_the_store(decision: Decision) -> None:
    assert decode_decision(decision.number, encode_decision(decision)) == decision


def test_sets_of_ranks() -> None:
    assert bit_set([3, 0, 3]) == 0b1001
    assert list(members(0b1001)) == [0, 3]
    assert mask_list(0b1001, 5) == (1, 0, 0, 1, 0)
