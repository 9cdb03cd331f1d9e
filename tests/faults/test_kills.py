"""SIGKILL: whoever dies, the survivors agree on one mask, deliver only what the reference gives, and go on."""

from __future__ import annotations

import time

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout
from tests.faults.engine import Engine, Record, check_delivered, die, run

pytestmark = pytest.mark.timeout(100)

AT, LAST = 5, 12


def killed_between_steps(
    bootstrap: BootstrapConfig, victims: dict[int, int], layout: EpLayout, renormalize: bool
) -> list[Record]:
    """Each victim dies before the step given for it; nobody is in a step then."""
    engine = Engine(bootstrap, layout, renormalize=renormalize)
    alive = 4
    for step in sorted({*victims.values()}):
        engine.serve(step - 1)
        engine.meet(f"before-{step}", alive)
        if victims.get(engine.rank) == step:
            die()
        alive -= sum(when == step for when in victims.values())
    engine.serve(LAST)
    engine.meet("end", alive)
    return engine.close()


def check_masks(logs: list[list[Record]], victims: dict[int, int]) -> None:
    """Flagged are exactly the steps before which somebody died; from the next one on the mask says who."""
    for log in (log for log in logs if log is not None):
        assert [record.step for record in log] == list(range(1, LAST + 1))
        assert [record.step for record in log if record.flagged] == sorted({*victims.values()})
        for record in log:
            assert record.mask == [int(victims.get(rank, LAST) >= record.step) for rank in range(4)]


@pytest.mark.parametrize("victim", range(4))
def test_any_rank_may_die(victim: int) -> None:
    layout = list(EpLayout)[victim % 3]
    logs = run(killed_between_steps, {victim: AT}, layout, False, dead=[victim])
    check_masks(logs, {victim: AT})
    assert check_delivered(logs) == 3 * (LAST - 1)


@pytest.mark.parametrize("victims", [{1: 5, 2: 5}, {0: 4, 1: 7}], ids=["at_once", "one_after_the_other"])
def test_two_ranks_die(victims: dict[int, int]) -> None:
    logs = run(killed_between_steps, victims, EpLayout.EXPERT_MAJOR, False, dead=list(victims))
    check_masks(logs, victims)
    check_delivered(logs)


@pytest.mark.parametrize("layout", EpLayout, ids=lambda layout: layout.name.lower())
def test_renormalize_rescales_what_lost_experts(layout: EpLayout) -> None:
    logs = run(killed_between_steps, {2: AT}, layout, True, dead=[2])
    check_masks(logs, {2: AT})
    check_delivered(logs, renormalize=True)


def killed_in_a_step(bootstrap: BootstrapConfig, victim: int, layout: EpLayout) -> list[Record]:
    """The victim dies with its rows on the way: dispatched, not combined."""
    engine = Engine(bootstrap, layout)
    engine.serve(AT - 1)
    if engine.rank == victim:
        engine.layer._compute = lambda *_: die()  # type: ignore[method-assign]
    engine.serve(LAST)
    engine.meet("end", 3)
    return engine.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_between_dispatch_and_combine(victim: int) -> None:
    logs = run(killed_in_a_step, victim, EpLayout.EXPERT_MAJOR, dead=[victim])
    check_masks(logs, {victim: AT})
    check_delivered(logs)


def flagged_outputs(bootstrap: BootstrapConfig) -> tuple[bool, list[int]]:
    engine = Engine(bootstrap)
    engine.serve(2)
    engine.meet("two")
    if engine.rank == 1:
        die()
    output = engine.forward()
    accused = [rank for rank in range(3) if engine.fleet.faults.accused >> rank & 1]
    engine.meet("seen", 2)
    engine.close()
    return bool(torch.isfinite(output).all()), accused


def test_the_first_flagged_output_is_finite_and_only_the_dead_is_accused() -> None:
    assert run(flagged_outputs, world=3, dead=[1]) == [(True, [1]), None, (True, [1])]


def killed_while_nobody_steps(bootstrap: BootstrapConfig) -> tuple[bool, list[int]]:
    engine = Engine(bootstrap)
    engine.serve(2)
    engine.meet("two")
    if engine.rank == 1:
        die()
    while not engine.fleet.query_fault():
        time.sleep(0.001)
    mask = engine.fleet.reconcile_active_mask().tolist()
    still = engine.fleet.query_fault()
    engine.meet("end", 2)
    engine.close()
    return still, mask


def test_a_death_is_seen_without_a_step_and_only_once() -> None:
    assert run(killed_while_nobody_steps, world=3, dead=[1]) == [(False, [1, 0, 1]), None, (False, [1, 0, 1])]
