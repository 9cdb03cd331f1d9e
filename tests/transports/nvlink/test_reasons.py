"""Peers of a rank that fails alone learn why, in the words of the other transports: in a step, and while a Fleet is
built. Kernels run under Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout, FleetAlgoKnobFaultTolerance, MoEEpError, MoEEpPeerError, create_fleet
from moefleet.fleet.stepping import step_failed
from moefleet.substrate.control import Operation
from tests.conformance.context import made, routed, sent
from tests.faults.engine import run
from tests.strategies import make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where there is a GPU: the conformance suite does this", allow_module_level=True)

pytestmark = pytest.mark.timeout(110)

WORLD, CULPRIT = 3, 1
MISTAKES = ("", "shape", "expert", "left", "out", "none", "")
PROBLEM = make_problem(7, WORLD, 3, 4, 2, [1, 2, 1])


def ready(bootstrap: BootstrapConfig) -> Any:
    """This process's nvlink, with checks, over a CPU."""
    from tests.transports.nvlink.pretend import CONFIG, pretend

    os.environ["MOEFLEET_CHECK"] = "1"
    pretend()
    return CONFIG


def one_step(fleet: Any, rank: int, mistake: str) -> None:
    x, ids, weights = (part[rank] for part in (PROBLEM.xs, PROBLEM.topk_ids, PROBLEM.topk_weights))
    with routed(fleet, ids, weights) as handle:
        nothing: list[Any] = [None] if mistake == "none" else []
        out = handle.dispatch(sent(x[1:] if mistake == "shape" else x, *nothing))
        if mistake == "expert":
            raise ZeroDivisionError("an expert divided by zero" + "!" * 600)
        if mistake != "left":
            home: Any = "home" if mistake == "out" else None
            handle.combine(made(out.expert_tensors.nan_to_num(), out=home))


def failing(bootstrap: BootstrapConfig, transport: str, tolerant: bool) -> list[tuple[int, str, str]]:
    """What each of MISTAKES, made by one rank, was to this rank: who it named, the reason, and all of the text."""
    comm = ready(bootstrap) if transport == "nvlink" else transport
    knobs = [FleetAlgoKnobFaultTolerance(timeout_ms=60_000)] if tolerant else []
    params, told = PROBLEM.params(EpLayout.FLAT), []
    with create_fleet(replace(bootstrap, timeout_s=60.0), params, knobs, comm) as fleet:
        for mistake in MISTAKES:
            try:
                one_step(fleet, bootstrap.rank, mistake if bootstrap.rank == CULPRIT else "")
                told.append((-1, "", ""))
            except (MoEEpError, ZeroDivisionError) as error:
                rank, reason = (error.rank, error.reason) if isinstance(error, MoEEpPeerError) else (-1, "")
                told.append((rank, reason, str(error)))
        if bootstrap.tcp_store.add("steps", 1) == WORLD:  # a Fleet that is destroyed ends the others' steps
            bootstrap.tcp_store.set("done", "")
        bootstrap.tcp_store.wait(["done"])
    return told


@pytest.mark.parametrize("tolerant", [False, True], ids=["plain", "tolerant"])
def test_reasons(tolerant: bool) -> None:
    got = run(failing, "nvlink", tolerant, world=WORLD, timeout_s=100)
    assert got == run(failing, "shm", tolerant, world=WORLD, timeout_s=100)
    for rank in (0, 2):
        healthy, shape, expert, left, out, none, last = got[rank]
        assert healthy == last == (-1, "", "")
        assert shape[0] == expert[0] == left[0] == out[0] == none[0] == CULPRIT
        assert shape[1] == got[CULPRIT][1][2] and "x[0]: got shape [1, 4]" in shape[1]
        assert expert[1] == ("ZeroDivisionError: an expert divided by zero" + "!" * 600)[:512]
        assert out[1] == got[CULPRIT][4][2] and "CombineInputParams.out: got a str" in out[1]
        assert none[1] == got[CULPRIT][5][2] and "DispatchInputParams.x: got 2 tensors" in none[1]
        assert left[1] == "its handle was destroyed before the step was combined"
        for step, operation, told in (2, Operation.DISPATCH, shape), (3, Operation.COMBINE, expert):
            assert told[2] == str(step_failed(CULPRIT, step, operation, told[1]))


def test_a_later_note_is_not_taken_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 and 5 share a place: who looks late for the reason of step 1 finds none, and still that of step 3."""
    from moefleet.transports.nvlink import notes
    from tests.transports.nvlink.pretend import _Torch
    from tests.transports.nvlink.simulate import World

    monkeypatch.setattr(notes, "torch", _Torch())
    world = World(PROBLEM.params(EpLayout.FLAT), WORLD)
    slot, engines, cpu = world.update(PROBLEM)[1], world.engines, torch.device("cpu")
    mine, theirs = (
        notes.Notes(engine.geometry, memory[-memory.data_ptr() % 128 :], cpu)
        for engine, memory in list(zip(engines, world.memory, strict=True))[:2]
    )
    assert mine.read(CULPRIT, 1) is None
    for step, reason in enumerate(["first", "second", "third", "fourth", "fifth"], 1):
        engines[CULPRIT].fail(slot, 0, theirs.write(Operation.DISPATCH, 2, reason), fresh=True, wait=False)
        note = mine.read(CULPRIT, step)
        assert note is not None and (note.origin, note.reason) == (2, reason)
    assert mine.read(CULPRIT, 1) is None and mine.read(0, 3) is None
    told = [mine.read(CULPRIT, step) for step in (2, 3)]
    assert [note.reason for note in told if note is not None] == ["second", "third"]


def without_memory(bootstrap: BootstrapConfig, part: str) -> list[Exception]:
    """Rank 1 cannot do its ``part`` in sharing memory."""
    from moefleet.transports.nvlink import topology

    comm = ready(bootstrap)
    if bootstrap.rank == CULPRIT:

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no memory left")

        setattr(topology.SymmetricMemory, part, fail)
    with pytest.raises((RuntimeError, MoEEpError)) as caught:
        create_fleet(replace(bootstrap, timeout_s=60.0), PROBLEM.params(EpLayout.FLAT), backend=comm)
    return [caught.value]


@pytest.mark.parametrize("part", ["allocate", "map"])
def test_a_rank_without_memory_is_not_waited_for(part: str) -> None:
    """Even where the others wait for it inside a library."""
    errors = [error for (error,) in run(without_memory, part, world=WORLD, timeout_s=50)]
    assert isinstance(errors[CULPRIT], RuntimeError) and str(errors[CULPRIT]) == "no memory left"
    for rank in (0, 2):
        assert isinstance(errors[rank], MoEEpPeerError) and errors[rank].rank == CULPRIT
        assert errors[rank].reason == "RuntimeError: no memory left"
