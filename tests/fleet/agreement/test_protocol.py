"""The pure function, one rank at a time: what it does next, given what the store says."""

from __future__ import annotations

import pytest

from moefleet.fleet.agreement.protocol import (
    Call,
    Done,
    Fail,
    Failure,
    Member,
    Offer,
    Operation,
    Post,
    Quorum,
    Read,
    ReadViews,
    Response,
    Step,
    Views,
    Wait,
    Woken,
    advance,
    begin,
)
from moefleet.fleet.agreement.values import Decision, Kind, View, first_decision

ALL = 0b111


def enter(
    rank: int = 0,
    accused: int = 0,
    last_step: int = 4,
    *,
    kind: Kind = Kind.RECONCILE,
    adopted: Decision | None = None,
    evicted: bool = False,
    quorum: Quorum = "majority",
) -> Step:
    """A rank of three that calls."""
    member = Member(rank, 3, quorum, incarnation=9)
    return begin(member, adopted or first_decision(3), Call(kind, accused, last_step), evicted=evicted)


def feed(step: Step, *responses: Response) -> Step:
    for response in responses:
        step = advance(step[0], response)
    return step


def then(step: Step, *responses: Response) -> Operation:
    return feed(step, *responses)[1]


def views(*ranks: int, accused: int = 0, step: int = 4, kind: Kind = Kind.RECONCILE, dead: int = 0) -> Views:
    return Views(tuple(View(rank, accused & ~(1 << rank), step, 9, kind) for rank in ranks), dead)


def decision(number: int, mask: int, resume_step: int = 5, kind: Kind = Kind.RECONCILE) -> Decision:
    return Decision(number, kind, mask, resume_step)


def waiting(rank: int = 0, **how: object) -> Step:
    """A rank that has read that there is nothing, and posted."""
    return feed(enter(rank, **how), None, None)  # type: ignore[arg-type]


def test_a_call_reads_posts_waits_looks_and_offers() -> None:
    step = enter(accused=0b100)
    assert step[1] == Read(1)
    step = feed(step, None)
    assert step[1] == Post(1, View(0, 0b100, 4, 9, Kind.RECONCILE))
    step = feed(step, None)
    assert step[1] == Wait(1, None, ALL)
    step = feed(step, Woken.LOOK)
    assert step[1] == ReadViews(1)
    assert then(step, views(0, 1)) == Wait(1, None, ALL), "rank 2 may still come"
    step = feed(step, views(0, 1, 2, accused=0b100))
    offered = decision(1, 0b011)
    assert step[1] == Offer(offered)
    assert then(step, offered) == Done(offered)


def test_an_offer_that_comes_second_adopts_what_is_there() -> None:
    step = feed(waiting(), Woken.LOOK, views(0, 1, 2))
    assert then(step, decision(1, 0b011)) == Done(decision(1, 0b011))
    assert then(step, decision(1, 0b110)) == Fail(Failure.EVICTED, decision(1, 0b110))


def test_every_decision_after_the_adopted_one_is_read_in_order_before_anything_is_posted() -> None:
    step = enter(1, adopted=decision(3, ALL, 2))
    assert step[1] == Read(4)
    assert then(step, decision(4, 0b110)) == Read(5)
    assert then(step, decision(4, 0b110), decision(5, 0b010)) == Read(6)
    assert then(step, decision(4, 0b110), decision(5, 0b010), None) == Done(decision(5, 0b010))


def test_an_eviction_comes_before_anything_else() -> None:
    assert then(enter(2), decision(1, 0b011)) == Fail(Failure.EVICTED, decision(1, 0b011))
    assert then(enter(2), decision(1, ALL), decision(2, 0b001)) == Fail(Failure.EVICTED, decision(2, 0b001))


def test_an_accusation_that_the_last_decision_lacks_leads_to_the_next_round() -> None:
    operation = then(enter(0, accused=0b110), decision(1, 0b011), None)
    assert operation == Post(2, View(0, 0b010, 4, 9, Kind.RECONCILE)), "whom it masks need not be accused again"
    step = feed(waiting(0, accused=0b010), decision(1, 0b011))
    assert step[1] == Read(2)
    assert isinstance(then(step, None), Post)


def test_a_decision_that_resumes_at_a_step_already_run_is_not_adopted() -> None:
    stale = decision(1, ALL, resume_step=4)
    for step in (feed(enter(0), stale, None), feed(waiting(0), stale, None)):
        assert step[1] == Post(2, View(0, 0, 4, 9, Kind.RECONCILE))


def test_a_view_says_at_least_the_step_before_the_one_that_the_last_decision_resumes_at() -> None:
    step = enter(0, accused=0b010, last_step=2)
    assert then(step, decision(1, ALL, 9), None) == Post(2, View(0, 0b010, 8, 9, Kind.RECONCILE))


def test_the_lowest_that_posted_offers_and_the_others_take_over_in_turn() -> None:
    step = feed(waiting(2), Woken.LOOK, views(0, 1, 2))
    for turn in (0, 1):
        assert step[1] == Wait(1, turn, ALL)
        assert then(step, Woken.LOOK, views(0, 1, 2)) == Wait(1, turn, ALL), "looking does not use up a turn"
        step = feed(step, Woken.EXPIRED, views(0, 1, 2))
    assert step[1] == Offer(decision(1, ALL)), "a takeover masks nobody that posted"


def test_a_dead_rank_is_not_waited_for_and_has_no_turn() -> None:
    assert isinstance(then(waiting(0), Woken.LOOK, views(0, 1, dead=0b100)), Offer)
    assert isinstance(then(waiting(1), Woken.LOOK, views(0, 1, 2, dead=0b001)), Offer)
    assert then(waiting(1), Woken.LOOK, views(0, 1, 2)) == Wait(1, 0, ALL)


def test_when_time_is_over_a_majority_decides_without_the_rest() -> None:
    step = feed(waiting(1), Woken.EXPIRED)
    assert then(step, views(1, 2)) == Offer(decision(1, 0b110))


def test_without_a_quorum_the_history_is_asked_once_more() -> None:
    step = feed(waiting(2), Woken.EXPIRED, views(2))
    assert step[1] == Read(1)
    assert then(step, None) == Fail(Failure.NO_QUORUM, first_decision(3), 0b011)
    assert then(step, decision(1, ALL)) == Done(decision(1, ALL))


def test_any_number_decides_where_the_knob_says_so() -> None:
    assert isinstance(then(waiting(2, quorum="any"), Woken.EXPIRED, views(2)), Offer)


def test_a_decision_found_while_waiting_is_adopted_without_reading_on() -> None:
    assert then(waiting(1), decision(1, 0b011)) == Done(decision(1, 0b011))
    assert then(waiting(2), decision(1, 0b011)) == Fail(Failure.EVICTED, decision(1, 0b011))


def test_an_evicted_rank_reads_past_its_eviction_to_be_readmitted() -> None:
    step = enter(2, kind=Kind.READMIT, evicted=True)
    step = feed(step, decision(1, 0b011, 6), None)
    assert step[1] == Post(2, View(2, 0, 5, 9, Kind.READMIT))
    back = decision(2, ALL, 6, Kind.READMIT)
    assert then(step, None, back) == Done(back)
    assert then(step, None, decision(2, 0b001)) == Read(3), "a round that was for something else"


def test_an_evicted_rank_offers_only_after_those_in_force() -> None:
    step = feed(enter(0, kind=Kind.READMIT, evicted=True), decision(1, 0b110, 6), None, None)
    step = feed(step, Woken.LOOK, views(0, 1, 2, kind=Kind.READMIT))
    assert step[1] == Wait(2, 0, 0b110)


def test_a_rank_that_does_not_know_of_its_eviction_is_told_before_it_is_readmitted() -> None:
    step = enter(2, kind=Kind.READMIT)
    assert then(step, decision(1, 0b011)) == Fail(Failure.EVICTED, decision(1, 0b011))


def test_a_readmission_waits_for_masked_ranks_and_needs_a_quorum_of_the_active() -> None:
    step = feed(waiting(0, kind=Kind.READMIT, adopted=decision(1, 0b011, 2)), Woken.LOOK)
    assert isinstance(then(step, views(0, 1, kind=Kind.READMIT)), Wait)
    assert then(step, views(0, 1, 2, kind=Kind.READMIT)) == Offer(decision(2, ALL, 5, Kind.READMIT))
    alone = feed(enter(2, kind=Kind.READMIT, evicted=True), decision(1, 0b011), None, None, Woken.EXPIRED)
    assert then(alone, views(2, kind=Kind.READMIT), None) == Fail(Failure.NO_QUORUM, decision(1, 0b011), 0b011)


def test_a_survivor_that_came_to_readmit_goes_on_after_a_round_of_reconciliation() -> None:
    step = feed(waiting(1, kind=Kind.READMIT), decision(1, 0b011))
    assert step[1] == Read(2)
    assert then(step, None) == Post(2, View(1, 0, 4, 9, Kind.READMIT))


def test_an_evicted_rank_cannot_reconcile() -> None:
    with pytest.raises(AssertionError):
        enter(2, evicted=True)
