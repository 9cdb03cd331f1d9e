"""Rounds of agreement over real Fleets: a rank a step ahead, too few ranks, two Fleets on one store."""

from __future__ import annotations

from typing import Any

import pytest

from moefleet import (
    BootstrapConfig,
    FleetAlgoKnobFaultTolerance,
    MoEEpConfigError,
    MoEEpNoQuorumError,
    MoEEpRankEvictedError,
    MoEEpStoreError,
    create_fleet,
)
from moefleet.substrate.control import State, Word
from tests.faults.engine import Engine, Record, check_delivered, problem_of, run

pytestmark = pytest.mark.timeout(100)


def one_step_ahead(bootstrap: BootstrapConfig) -> tuple[list[Record], list[int], int, int]:
    """All but rank 1 enter a round; rank 1 is in the next step already, and waits for them there."""
    engine = Engine(bootstrap)
    fleet = engine.fleet
    engine.serve(4)
    if engine.rank == 1:
        assert engine.step(), "ranks that are in a round let the step end, flagged"
        assert not fleet.faults.accused
    mask = fleet.reconcile_active_mask().tolist()
    resumed, epoch = fleet.stats()["steps"] + 1, fleet.active_mask_epoch
    engine.serve(12)
    engine.meet("end")
    return engine.close(), mask, epoch, resumed


def test_a_rank_a_step_ahead_meets_the_others_again() -> None:
    """Case 33: with rounds counted by each rank, the one ahead decided on its own."""
    results = run(one_step_ahead)
    logs = [log for log, *_ in results]
    check_delivered(logs)
    assert [(mask, epoch, resumed) for _, mask, epoch, resumed in results] == [([1] * 4, 1, 6)] * 4
    for log in logs:
        assert [record.step for record in log if not record.flagged] == [1, 2, 3, 4, *range(6, 13)]


def without_faults(bootstrap: BootstrapConfig) -> tuple[list[int], list[int], list[Record]]:
    """Rounds when nothing is wrong change nothing, however many there are."""
    engine = Engine(bootstrap)
    epochs = []
    for number in range(1, 6):
        engine.serve(2 * number)
        mask = engine.fleet.reconcile_active_mask().tolist()
        epochs.append(engine.fleet.active_mask_epoch)
        said = engine.fleet.group.waiter.said
        assert (said(engine.rank, Word.STATE), said(engine.rank, Word.ROUND)) == (State.RUNNING, epochs[-1])
    engine.meet("end")
    return mask, epochs, engine.close()


def test_rounds_without_a_fault_mask_nobody_and_flag_no_step() -> None:
    results = run(without_faults, world=3)
    assert [(mask, epochs) for mask, epochs, _ in results] == [([1, 1, 1], [1, 2, 3, 4, 5])] * 3
    assert check_delivered([log for *_, log in results]) == 30


def forgiving(bootstrap: BootstrapConfig) -> tuple[list[bool], list[list[int]], list[Record]]:
    """Rank 0 accuses rank 1, and forgets it: once alone, once in a readmission."""
    engine = Engine(bootstrap)
    fleet, faults, masks = engine.fleet, [], []
    engine.serve(2)
    engine.meet("two")
    for readmit in (False, True):
        if engine.rank == 0:
            fleet.faults.accuse(1)
            faults.append(fleet.query_fault())
        masks.append(fleet.clear_faults(readmit=readmit).tolist())
        faults.append(fleet.query_fault())
    engine.serve(6)
    engine.meet("end")
    return faults, masks, engine.close()


def test_accusations_are_forgiven() -> None:
    first, *others = run(forgiving, world=3)
    assert first[0] == [True, False, True, False]
    assert [faults for faults, *_ in others] == [[False, False]] * 2
    assert all(masks == [[1, 1, 1]] * 2 for _, masks, _ in (first, *others))
    assert check_delivered([log for *_, log in (first, *others)]) == 18


def too_few(bootstrap: BootstrapConfig, quorum: str) -> tuple[str, list[int], int, bool]:
    """Rank 0 of three calls alone; the others are alive, and call when it has given up."""
    engine = Engine(bootstrap, quorum=quorum, coordinator_takeover_s=0.5)
    fleet, said = engine.fleet, ""
    engine.serve(3)
    if engine.rank == 0:
        try:
            fleet.reconcile_active_mask(timeout_s=0.5)
        except MoEEpNoQuorumError as error:
            said = str(error)
        result = said, fleet.query_active_mask().tolist(), fleet.active_mask_epoch, False
    engine.meet("alone")
    if engine.rank != 0:
        try:
            fleet.reconcile_active_mask(timeout_s=5.0)
            result = "", fleet.query_active_mask().tolist(), fleet.active_mask_epoch, False
        except MoEEpRankEvictedError:
            result = "", [], 0, True
    elif quorum == "majority":
        fleet.reconcile_active_mask(timeout_s=5.0)
    engine.meet("end")
    engine.close()
    return result


def test_a_minority_decides_nothing() -> None:
    alone, *others = run(too_few, "majority", world=3)
    said, mask, epoch, _ = alone
    assert "[1, 2] did not answer" in said and (mask, epoch) == ([1, 1, 1], 0)
    assert others == [("", [1, 1, 1], 1, False)] * 2


def test_quorum_any_lets_one_rank_go_on_alone() -> None:
    alone, *others = run(too_few, "any", world=3)
    assert alone == ("", [1, 0, 0], 1, False)
    assert [evicted for *_, evicted in others] == [True, True]


def two_fleets(bootstrap: BootstrapConfig) -> tuple[list[Any], list[Any], list[Record], list[Record]]:
    """The first Fleet gives rank 2 up; the second, on the same store, never hears of it."""
    one, two = Engine(bootstrap), Engine(bootstrap)
    first: Any = None
    for engine in (one, two):
        engine.serve(2)
    if one.rank != 2:
        one.fleet.set_active_mask([1, 1, 0])
    try:
        first = one.fleet.reconcile_active_mask().tolist()
    except MoEEpRankEvictedError:
        first = "evicted"
    before = two.fleet.query_fault(), two.fleet.active_mask_epoch
    two.serve(4)
    second = two.fleet.reconcile_active_mask().tolist()
    two.serve(6)
    if one.rank != 2:
        one.serve(6)
    one.meet("end")
    return [first, one.fleet.active_mask_epoch], [before, second, two.fleet.active_mask_epoch], one.close(), two.close()


def test_two_fleets_on_one_store_never_meet() -> None:
    """Case 33: a second fleet adopted the first one's decision and gave a healthy rank up."""
    results = run(two_fleets, world=3)
    assert [first for first, *_ in results] == [[[1, 1, 0], 1]] * 2 + [["evicted", 0]]
    assert [second for _, second, *_ in results] == [[(False, 0), [1, 1, 1], 1]] * 3
    check_delivered([log for *_, log, _ in results])
    check_delivered([log for *_, log in results])


def masks_by_hand(bootstrap: BootstrapConfig) -> tuple[list[str], list[Record]]:
    """set_active_mask: what is refused, and what steps do under it."""
    engine = Engine(bootstrap)
    fleet, refused = engine.fleet, []
    mine_off = [int(rank != engine.rank) for rank in range(3)]
    for wrong in ([1, 1], [1, 1, 1, 1], [1, 1, 2], [1, -1, 1], mine_off):
        with pytest.raises(MoEEpConfigError) as caught:
            fleet.set_active_mask(wrong)
        refused.append(str(caught.value))
    engine.serve(2)
    engine.meet("two")
    if engine.rank != 1:
        fleet.set_active_mask([1, 0, 1])
        assert not fleet.query_fault() and fleet.active_mask_epoch == 0
        engine.serve(5)
    engine.meet("end")
    return refused, engine.close()


def test_masks_by_hand() -> None:
    results = run(masks_by_hand, world=3)
    for refused, _ in results:
        assert ["entries" in text for text in refused] == [True, True, False, False, False]
        assert "never masks itself" in refused[-1]
    check_delivered([log for _, log in results])
    assert [record.mask for record in results[0][1]] == [[1, 1, 1]] * 2 + [[1, 0, 1]] * 3


def test_a_lost_store_names_its_address() -> None:
    """Host and port in the message, and the mask as it was."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    knob = FleetAlgoKnobFaultTolerance(reconcile_timeout_s=2.0, coordinator_takeover_s=0.5)
    with create_fleet(BootstrapConfig(1, 0, tcp_store=client), problem_of(1, 1).params(), [knob], "shm") as fleet:
        port = store.port
        del store
        with pytest.raises(MoEEpStoreError, match=f"127.0.0.1:{port}.*mask is unchanged"):
            fleet.reconcile_active_mask()
        assert fleet.query_active_mask().tolist() == [1] and fleet.active_mask_epoch == 0
