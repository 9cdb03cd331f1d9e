"""SIGSTOP, SIGCONT and ranks that are late: accused, evicted, readmitted, and nobody else with them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout, MoEEpConfigError, MoEEpRankEvictedError, ShmConfig
from moefleet.substrate.control import Word
from tests.faults.engine import Engine, Record, check_delivered, go_on, healthy, run, stop_here
from tests.native.needs import needs_the_helper

pytestmark = pytest.mark.timeout(100)

AT, LATER, DEGRADED, LAST = 5, 7, 10, 20
SILENCE_MS = 1500
"""A rank that lives is rarely silent for so long, also where four share a core."""


def come_back(engine: Engine) -> list[str]:
    """What a rank does that finds itself given up on; what each of its calls said."""
    fleet, said = engine.fleet, []
    assert engine.step(), "the others went on without this rank, and its step was not flagged"
    calls: list[tuple[str, Any]] = [
        ("reconcile", fleet.reconcile_active_mask),
        ("query_fault", fleet.query_fault),
        ("query_active_mask", fleet.query_active_mask),
        ("set_active_mask", lambda: fleet.set_active_mask([1] * engine.world)),
        ("clear_faults", fleet.clear_faults),
        ("update_topology", lambda: fleet.update_topology(engine.bootstrap)),
        ("forward", engine.forward),
        ("reconcile again", fleet.reconcile_active_mask),
    ]
    for name, call in calls:
        try:
            call()
        except MoEEpRankEvictedError as error:
            assert "clear_faults(readmit=True)" in str(error)
            said.append(name)
    return said


def stopped(bootstrap: BootstrapConfig, victim: int, layout: EpLayout) -> tuple[list[Record], Any, list[int]]:
    """The victim is stopped, given up on, continued and readmitted."""
    engine = Engine(bootstrap, layout, timeout_ms=SILENCE_MS, reconcile_timeout_s=20.0, coordinator_takeover_s=5.0)
    fleet = engine.fleet
    engine.serve(AT - 1)
    engine.meet("before")
    seen: Any
    if engine.rank == victim:
        stop_here(engine, "stopped")
        seen = come_back(engine)
    else:
        assert engine.step()
        seen = [rank for rank in range(4) if fleet.faults.accused >> rank & 1]
        engine.meet("given up", 3)
        fleet.reconcile_active_mask(timeout_s=1.0)
        engine.serve(DEGRADED)
        engine.meet("degraded", 3)
        if engine.rank == (victim + 1) % 4:
            go_on(engine, "stopped")
    mask = fleet.clear_faults(readmit=True).tolist()
    engine.serve(LAST)
    engine.meet("end")
    return engine.close(), seen, mask


@pytest.mark.parametrize(("victim", "layout"), [(0, EpLayout.RANK_MAJOR), (2, EpLayout.EXPERT_MAJOR)])
def test_stopped_then_readmitted(victim: int, layout: EpLayout) -> None:
    results = run(stopped, victim, layout)
    logs = [log for log, _, _ in results]
    check_delivered(logs)
    everybody, without = [1] * 4, [int(rank != victim) for rank in range(4)]
    for rank, (log, seen, mask) in enumerate(results):
        assert mask == everybody
        if rank == victim:  # every call but the readmission was refused
            assert len(seen) == 8, seen
        else:  # one stopped rank, and nobody else was accused with it
            assert seen == [victim]
            assert [record.step for record in log if record.flagged] == [AT]
            assert all(record.mask == without for record in log if AT < record.step <= DEGRADED)
        back = [record for record in log if record.step > DEGRADED]
        assert [record.step for record in back] == list(range(DEGRADED + 1, LAST + 1))
        for record in back:
            assert record.mask == everybody
            assert torch.equal(record.output, healthy(rank, record.step, layout)), record.step


def stopped_in_a_copy(bootstrap: BootstrapConfig, layout: EpLayout) -> list[Record]:
    """Rank 1 is stopped while it places rows, and goes on when the others are in the middle of a later step."""
    engine = Engine(
        bootstrap, layout, comm=ShmConfig(place_bytes=0), timeout_ms=SILENCE_MS, reconcile_timeout_s=20.0,
        coordinator_takeover_s=5.0,
    )  # fmt: skip
    fleet = engine.fleet
    push, compute = fleet.moves.push, engine.layer.kernel.compute

    def push_late(at: Any, tokens: torch.Tensor, *more: Any) -> None:
        if engine.fleet.steps.last == AT:
            stop_here(engine, "copying")
            tokens = torch.full_like(tokens, 1e6)
        push(at, tokens, *more)

    def compute_late(*arrived: Any, **more: Any) -> torch.Tensor:
        if engine.fleet.steps.last == LATER:
            if engine.rank == 0:
                go_on(engine, "copying")
            engine.told("copied")
        return compute(*arrived, **more)

    engine.serve(AT - 1)
    engine.meet("before")
    if engine.rank == 1:
        fleet.whole, fleet.moves.push = None, push_late
        assert engine.step()
        engine.tell("copied")
        with pytest.raises(MoEEpRankEvictedError):
            fleet.reconcile_active_mask()
    else:
        engine.layer.kernel.compute = compute_late  # type: ignore[method-assign]
        assert engine.step()
        engine.meet("given up", 3)
        fleet.reconcile_active_mask(timeout_s=1.0)
        engine.serve(LAST)
    engine.meet("end")
    return engine.close()


@needs_the_helper
@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_a_rank_that_wakes_up_in_the_middle_of_a_copy(layout: EpLayout) -> None:
    logs = run(stopped_in_a_copy, layout)
    assert check_delivered(logs) == 4 * (AT - 1) + 3 * (LAST - AT)
    assert all(record.mask == [1, 0, 1, 1] for log in logs for record in log if record.step > AT)


def masks_that_differ(bootstrap: BootstrapConfig, layout: EpLayout) -> tuple[bool, bool]:
    """Rank 0 alone masks rank 2, by hand, so that it receives in other memory than rank 1 places rows in."""
    engine = Engine(bootstrap, layout, comm=ShmConfig(place_bytes=0), timeout_ms=SILENCE_MS)
    engine.serve(AT - 1)
    if engine.rank == 0:
        engine.fleet.set_active_mask([1, 1, 0])
    y = engine.forward()
    engine.meet("end")
    outcome = engine.fleet.query_fault(), bool(y.isfinite().all())
    engine.close()
    return outcome


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_masks_that_differ_are_noticed_by_all(layout: EpLayout) -> None:
    assert run(masks_that_differ, layout, world=3) == [(True, True)] * 3


def late(bootstrap: BootstrapConfig, victim: int) -> tuple[list[Record], bool, list[int]]:
    """The victim is late for a step; the round waits for it, and its own view comes too late to save it."""
    engine = Engine(bootstrap, timeout_ms=SILENCE_MS)
    engine.serve(AT - 1)
    engine.meet("before", 3)
    evicted, others = False, [rank for rank in range(3) if rank != victim]
    if engine.rank == victim:
        for rank in others:
            engine.told(f"{rank} gave up")
    assert engine.step()
    engine.tell(f"{engine.rank} gave up")
    try:
        engine.fleet.reconcile_active_mask()
    except MoEEpRankEvictedError:
        evicted = True
    mask = engine.fleet.clear_faults(readmit=True).tolist()
    engine.serve(LAST)
    engine.meet("end", 3)
    return engine.close(), evicted, mask


def test_a_late_rank_is_evicted_and_readmitted() -> None:
    results = run(late, 1, world=3)
    check_delivered([log for log, _, _ in results])
    assert [evicted for _, evicted, _ in results] == [False, True, False]
    assert [mask for _, _, mask in results] == [[1, 1, 1]] * 3


def stopped_while_it_waits(bootstrap: BootstrapConfig) -> tuple[list[Record], int]:
    """Rank 1 waits for rank 0, is stopped for three times its own time-out, and goes on."""
    engine = Engine(bootstrap, timeout_ms=1000)
    fleet = engine.fleet
    engine.serve(AT - 1)
    if engine.rank == 1:
        engine.tell("pid", os.getpid())
    else:
        other = int(engine.told("pid"))
        while not fleet.group.waiter.said(1, Word.WAITING_ON):
            time.sleep(0.0005)
        os.kill(other, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(other, signal.SIGCONT)
    engine.serve(LAST)
    engine.meet("end")
    return engine.close(), fleet.faults.accused


def test_a_rank_that_was_itself_stopped_accuses_nobody() -> None:
    results = run(stopped_while_it_waits, world=2)
    logs = [log for log, _ in results]
    assert check_delivered(logs) == 2 * LAST
    assert [accused for _, accused in results] == [0, 0]


def open_step(bootstrap: BootstrapConfig) -> list[str]:
    """Fault calls with a step half-way."""
    from moefleet import DispatchInputParams, HandleAlgoKnobTopKWeights, HandleParams

    engine = Engine(bootstrap)
    fleet = engine.fleet
    handle = fleet.create_handle(
        HandleParams(torch.zeros(1, 1, dtype=torch.int64)), [HandleAlgoKnobTopKWeights(torch.ones(1, 1))]
    )
    handle.dispatch(DispatchInputParams([torch.ones(1, 8)]))
    refused = []
    for call in (
        fleet.reconcile_active_mask,
        fleet.clear_faults,
        lambda: fleet.clear_faults(readmit=True),
        lambda: fleet.set_active_mask([1]),
        lambda: fleet.update_topology(engine.bootstrap),
    ):
        with pytest.raises(MoEEpConfigError, match="1 open steps") as caught:
            call()
        refused.append(str(caught.value).split(":")[0])
    assert not fleet.query_fault()
    handle.destroy()
    assert fleet.reconcile_active_mask().tolist() == [1]
    engine.close()
    return refused


def test_fault_calls_come_between_steps() -> None:
    names = ["reconcile_active_mask", "clear_faults", "clear_faults", "set_active_mask", "update_topology"]
    assert run(open_step, world=1) == [names]
