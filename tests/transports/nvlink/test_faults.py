"""The whole Fleet in processes that are killed, stopped and replaced; kernels run under Triton's interpreter."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout, MoEEpRankEvictedError
from tests.faults.engine import EXPERTS, Engine, Record, check_delivered, die, go_on, run, stop_here

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip(
        "kernels are compiled where there is a GPU: see benchmarks/gpu/check_faults.py", allow_module_level=True
    )

pytestmark = pytest.mark.timeout(110)

AT, DEGRADED, LAST = 3, 5, 8
SILENCE_MS = 4000


def engine_on_nvlink(bootstrap: BootstrapConfig, layout: EpLayout, **options: Any) -> Engine:
    from tests.transports.nvlink.pretend import CONFIG, pretend

    pretend()
    return Engine(bootstrap, layout, comm=CONFIG, **options)


def killed_and_replaced(bootstrap: BootstrapConfig, victim: int, layout: EpLayout) -> tuple[list[Record], ...]:
    """One of three dies; the others go on without it; then the fourth process takes its place."""
    from tests.faults.test_topology import go_over

    if bootstrap.rank == 3:
        bootstrap.tcp_store.wait(["told/dead"])
        engine, first = engine_on_nvlink(bootstrap, layout, world=3, rank=victim), []
    else:
        engine = engine_on_nvlink(bootstrap, layout, world=3)
        engine.serve(AT - 1)
        engine.meet("before")
        if engine.rank == victim:
            engine.tell("dead")
            die()
        engine.serve(DEGRADED)
        first = engine.log
        go_over(engine, 3, engine.rank)
    engine.serve(2)
    engine.meet("end")
    return first, engine.close()


@pytest.mark.parametrize(
    ("victim", "layout"), [(0, EpLayout.EXPERT_MAJOR), (2, EpLayout.FLAT)], ids=["lowest", "highest"]
)
def test_killed_and_replaced(victim: int, layout: EpLayout) -> None:
    results = run(killed_and_replaced, victim, layout, dead=[victim], timeout_s=100)
    survivors = [rank for rank in range(3) if rank != victim]
    logs = [results[rank][0] if rank in survivors else [] for rank in range(3)]
    without = [int(rank != victim) for rank in range(3)]
    assert check_delivered(logs) == 2 * (DEGRADED - 1)
    for rank in survivors:
        assert [record.step for record in logs[rank] if record.flagged] == [AT]
        assert [record.mask for record in logs[rank]] == [[1, 1, 1]] * AT + [without] * (DEGRADED - AT)
    after = [results[3 if rank == victim else rank][1] for rank in range(3)]
    assert check_delivered(after) == 6
    assert all(record.mask == [1, 1, 1] for log in after for record in log)


def stopped(bootstrap: BootstrapConfig, victim: int, layout: EpLayout) -> tuple[list[Record], Any, list[int]]:
    """The victim is stopped, given up on, continued and readmitted."""
    engine = engine_on_nvlink(bootstrap, layout, timeout_ms=SILENCE_MS, quorum="any")
    fleet = engine.fleet
    engine.serve(AT - 1)
    engine.meet("before")
    seen: Any
    if engine.rank == victim:
        stop_here(engine, "stopped")
        assert engine.step(), "the others went on without this rank, and its step was not flagged"
        seen = []
        for call in (fleet.reconcile_active_mask, fleet.query_fault, fleet.clear_faults, engine.forward):
            with pytest.raises(MoEEpRankEvictedError, match=r"clear_faults\(readmit=True\)"):
                call()
            seen.append(fleet.faults.accused)
    else:
        assert engine.step()
        seen = fleet.faults.accused
        fleet.reconcile_active_mask(timeout_s=0.5)
        engine.serve(DEGRADED)
        engine.meet("degraded", engine.world - 1)
        if engine.rank == (victim + 1) % engine.world:
            go_on(engine, "stopped")
    mask = fleet.clear_faults(readmit=True).tolist()
    engine.serve(LAST)
    engine.meet("end")
    return engine.close(), seen, mask


def undisturbed(bootstrap: BootstrapConfig, layout: EpLayout) -> list[Record]:
    engine = engine_on_nvlink(bootstrap, layout)
    engine.serve(LAST)
    engine.meet("end")
    return engine.close()


def test_stopped_then_readmitted() -> None:
    victim, layout = 0, EpLayout.RANK_MAJOR
    healthy = run(undisturbed, layout, world=2, timeout_s=100)
    results = run(stopped, victim, layout, world=2, timeout_s=100)
    check_delivered([log for log, _, _ in results])
    for rank, (log, seen, mask) in enumerate(results):
        assert mask == [1, 1]
        assert seen == ([0] * 4 if rank == victim else 1 << victim)
        back = [record for record in log if record.step > DEGRADED]
        assert [record.step for record in back] == list(range(DEGRADED + 1, LAST + 1))
        for record in back:
            assert record.mask == [1, 1]
            assert torch.equal(record.output, healthy[rank][record.step - 1].output), record.step


def one_goes_to_a_round(bootstrap: BootstrapConfig) -> list[Record]:
    """Rank 0 calls for a round by itself: the step in which rank 1 waits for it ends at once, and nobody is accused."""
    engine = engine_on_nvlink(bootstrap, EpLayout.FLAT)
    engine.serve(AT - 1)
    if engine.rank == 0:
        time.sleep(0.3)
        engine.fleet.reconcile_active_mask()
    else:
        assert engine.step()
        assert engine.fleet.faults.accused == 0 and engine.fleet.faults.behind
        engine.fleet.reconcile_active_mask()
    assert engine.fleet.active_mask_epoch == 1
    engine.serve(AT + 2)
    engine.meet("end")
    return engine.close()


def test_a_rank_in_a_round_is_not_waited_for() -> None:
    logs = run(one_goes_to_a_round, world=2, timeout_s=60)
    check_delivered(logs)
    assert [[record.step for record in log if record.flagged] for log in logs] == [[], [AT]]
    assert all(record.mask == [1, 1] for log in logs for record in log)


def left_and_masked_by_hand(bootstrap: BootstrapConfig) -> list[Record]:
    """Rank 2 destroys its Fleet; rank 1 is masked and taken back by hand, alike on the others."""
    engine = engine_on_nvlink(bootstrap, EpLayout.EXPERT_MAJOR, renormalize=True)
    engine.serve(AT - 1)
    engine.meet("before")
    if engine.rank == 2:
        return engine.close()
    assert engine.step() and engine.fleet.faults.accused == 1 << 2
    assert engine.fleet.reconcile_active_mask().tolist() == [1, 1, 0]
    engine.serve(AT + 1)
    old = engine.fleet.create_handle(*_routing(engine))
    if engine.rank == 0:
        engine.fleet.set_active_mask([1, 0, 0])
        assert engine.fleet.query_active_mask().tolist() == [1, 0, 0]
        engine.serve(AT + 2)
    engine.meet("masked", 2)
    old.destroy()
    return engine.close()


def _routing(engine: Engine) -> Any:
    from moefleet import HandleAlgoKnobTopKWeights, HandleParams

    ids = torch.zeros(1, 1, dtype=torch.int64) + engine.rank % EXPERTS
    return HandleParams(ids), [HandleAlgoKnobTopKWeights(torch.ones(1, 1))]


def test_left_and_masked_by_hand() -> None:
    logs = run(left_and_masked_by_hand, world=3, timeout_s=60)
    assert check_delivered(logs, renormalize=True) == 3 * (AT - 1) + 2 + 1
