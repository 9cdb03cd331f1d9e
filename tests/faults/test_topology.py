"""update_topology: ranks removed, replaced and added, whoever they are; nothing of the old ranks is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moefleet import BootstrapConfig, EpLayout, MoEEpConfigError, MoEEpTimeoutError
from moefleet.placement import Placement
from tests.faults.engine import EXPERTS, Engine, Record, check_delivered, die, run, weights_of

pytestmark = pytest.mark.timeout(100)

LAYOUTS = list(EpLayout)


def go_over(engine: Engine, world: int, rank: int, **changes: Any) -> None:
    """This rank's part in the change, with the experts that it then holds."""
    engine.bootstrap = replace(engine.bootstrap, world_size=world, rank=rank, **changes)
    engine.layer.update_topology(engine.bootstrap, weights_of(Placement.contiguous(EXPERTS, world), rank))
    engine.log = []


def removed(bootstrap: BootstrapConfig, victim: int, layout: EpLayout) -> list[Record]:
    engine = Engine(bootstrap, layout)
    engine.serve(4)
    engine.meet("before")
    if engine.rank == victim:
        die()
    engine.serve(7)
    go_over(engine, 2, engine.rank - (engine.rank > victim))
    assert engine.fleet.stats()["steps"] == 0
    engine.serve(9)
    engine.meet("end", 2)
    return engine.close()


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_is_removed(victim: int) -> None:
    """Case 34: losing a rank in the middle broke what losing the last one did not."""
    results = run(removed, victim, LAYOUTS[victim], world=3, dead=[victim])
    logs = [log for log in results if log is not None]
    assert check_delivered(logs) == 18
    assert all(record.mask == [1, 1] for log in logs for record in log)


def replaced(bootstrap: BootstrapConfig, victim: int, layout: EpLayout, agree_first: bool) -> list[Record]:
    """Rank ``victim`` of three dies; the fourth process, until then nobody, takes its place."""
    if bootstrap.rank == 3:
        bootstrap.tcp_store.wait(["told/dead"])
        engine = Engine(bootstrap, layout, world=3, rank=victim)
    else:
        engine = Engine(bootstrap, layout, world=3)
        engine.serve(4)
        engine.meet("before")
        if engine.rank == victim:
            engine.tell("dead")
            die()
        if agree_first:
            engine.serve(7)
        go_over(engine, 3, engine.rank)
    engine.serve(9)
    engine.meet("end")
    second = Engine(bootstrap, layout, world=3, rank=engine.rank)  # another Fleet of the same processes
    second.serve(3)
    assert second.fleet.spec.meeting.fleet_id != engine.fleet.spec.meeting.fleet_id
    second.meet("end of the second")
    second.close()
    return engine.close()


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_is_replaced_by_a_new_process(victim: int) -> None:
    results = run(replaced, victim, LAYOUTS[victim], victim != 1, dead=[victim])
    logs = [results[3] if rank == victim else results[rank] for rank in range(3)]
    assert check_delivered(logs) == 27
    assert all(record.mask == [1, 1, 1] for log in logs for record in log)


def grown(bootstrap: BootstrapConfig) -> tuple[list[Record], str]:
    said = ""
    if bootstrap.rank == 3:
        bootstrap.tcp_store.wait(["told/ready"])
        engine = Engine(bootstrap, world=4, capacity=4)
    else:
        engine = Engine(bootstrap, world=3, capacity=4)
        engine.serve(3)
        with pytest.raises(MoEEpConfigError, match="at most the capacity, 4") as caught:
            engine.fleet.update_topology(replace(engine.bootstrap, world_size=5))
        said = str(caught.value)
        engine.tell("ready")
        go_over(engine, 4, engine.rank)
    engine.serve(5)
    engine.meet("end")
    return engine.close(), said


def test_a_rank_is_added_up_to_the_capacity() -> None:
    results = run(grown)
    assert check_delivered([log for log, _ in results]) == 20
    assert all("FleetAlgoKnobTopologyCapacity" in said for _, said in results[:3])


def nobody_comes(bootstrap: BootstrapConfig) -> tuple[list[Record], bool]:
    """The new process never comes; the Fleet goes on as it was, and the next attempt works."""
    engine = Engine(bootstrap, world=3)
    engine.serve(2)
    patient = engine.bootstrap
    late = False
    try:
        engine.fleet.update_topology(replace(patient, timeout_s=0.5))
        if bootstrap.rank == 0:
            raise AssertionError("rank 2 did not call")
    except MoEEpTimeoutError:
        late = True
    engine.serve(4)
    go_over(engine, 3, engine.rank, timeout_s=patient.timeout_s)
    engine.serve(6)
    engine.meet("end")
    return engine.close(), late


def absent(bootstrap: BootstrapConfig) -> tuple[list[Record], bool]:
    """Rank 2 does not come to the first attempt."""
    if bootstrap.rank < 2:
        return nobody_comes(bootstrap)
    engine = Engine(bootstrap, world=3)
    engine.serve(4)
    go_over(engine, 3, engine.rank)
    engine.serve(6)
    engine.meet("end")
    return engine.close(), False


def test_a_change_that_failed_leaves_the_fleet_as_it_was_and_can_be_tried_again() -> None:
    results = run(absent, world=3)
    assert [late for _, late in results] == [True, True, False]
    assert check_delivered([log for log, _ in results]) == 18


def nothing_kept(bootstrap: BootstrapConfig) -> dict[str, Any]:
    """Masks, epochs, accusations and counters, before and after the ranks changed to the same ranks."""
    engine = Engine(bootstrap)
    fleet = engine.fleet
    engine.serve(3)
    fleet.reconcile_active_mask()
    fleet.set_active_mask([1] * 3)
    fleet.faults.accuse((engine.rank + 1) % 3)
    fleet.faults.behind = True
    old = fleet.faults, fleet.group, fleet.steps, fleet.agreement, fleet.buffers
    engine.meet("wrong")
    go_over(engine, 3, engine.rank)
    new = fleet.faults, fleet.group, fleet.steps, fleet.agreement, fleet.buffers
    stats = fleet.stats()
    found = {
        "kept": [type(a).__name__ for a, b in zip(old, new, strict=True) if a is b],
        "fault": fleet.query_fault(),
        "mask": fleet.query_active_mask().tolist(),
        "epoch": fleet.active_mask_epoch,
        "counters": stats["steps"] + stats["tokens"] + sum(stats["rows_received"]) + sum(stats["tokens_per_expert"]),
        "closed": old[1].closed,
        "decision": fleet.reconcile_active_mask().tolist(),
        "epoch after": fleet.active_mask_epoch,
    }
    engine.meet("end")
    engine.close()
    return found


def test_nothing_of_the_old_ranks_is_kept() -> None:
    """Case 32: state kept across a change of ranks let stale answers through."""
    expected = {
        "kept": [], "fault": False, "mask": [1, 1, 1], "epoch": 0, "counters": 0, "closed": True,
        "decision": [1, 1, 1], "epoch after": 1,
    }  # fmt: skip
    assert run(nothing_kept, world=3) == [expected] * 3


def wrong_weights(bootstrap: BootstrapConfig) -> list[str]:
    """What the layer refuses before anything changes."""
    engine = Engine(bootstrap)
    layer, said = engine.layer, []
    eight = weights_of(Placement.contiguous(8, 1), 0)
    for weights, placement in ((eight, None), (None, Placement(EXPERTS, (EXPERTS,), tuple(reversed(range(EXPERTS)))))):
        with pytest.raises(MoEEpConfigError) as caught:
            layer.update_topology(engine.bootstrap, weights, placement=placement)
        said.append(str(caught.value))
    with pytest.raises(MoEEpConfigError) as caught:
        layer.replace_weights(eight)
    said.append(str(caught.value))
    shared = type(layer)(engine.bootstrap, layer.fleet.params, layer.weights, fleet=layer.fleet)
    with pytest.raises(MoEEpConfigError) as caught:
        shared.update_topology(engine.bootstrap)
    said.append(str(caught.value))
    layer.update_topology(engine.bootstrap)  # the experts stay: so may the weights
    shared.replace_weights(weights_of(layer.fleet.placement, 0))
    engine.serve(3)
    check_delivered([engine.close()])
    return said


def test_a_layer_wants_the_weights_of_its_new_experts() -> None:
    [said] = run(wrong_weights, world=1)
    assert ["9, experts" in said[0], "None while rank 0" in said[1], "9, experts" in said[2]] == [True] * 3
    assert "replace_weights" in said[3]
