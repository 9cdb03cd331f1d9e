"""Ranks that do different things: random programs of halves and failures, over a group that refuses to be torn.

The ranks are threads, so that hundreds of programs run in seconds; the transport's code is all there is between them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    Fleet,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpPeerError,
    MoEEpTimeoutError,
    create_fleet,
    reference,
)
from tests.strategies import LAYOUTS, Problem, make_problem
from tests.transports.torch_dist.fake_group import FakeWorld
from tests.transports.torch_dist.ranks import caught

WAIT_S = 20.0


def in_threads(
    world_size: int,
    body: Callable[[int, Fleet], Any],
    params: FleetParams,
    timeout_s: float = WAIT_S,
    limit_s: float = 1000.0,
) -> list[Any]:
    """``body(rank, fleet)`` on ``world_size`` ranks that are threads; what each returned or raised."""
    world, store = FakeWorld(world_size, limit_s), dist.HashStore()
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            bootstrap = BootstrapConfig(
                world_size, rank, device="cpu", process_group=world.group(rank), tcp_store=store, timeout_s=timeout_s
            )
            with create_fleet(bootstrap, params, backend="torch_dist") as fleet:
                results[rank] = body(rank, fleet)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    assert not world.torn, world.torn
    return results


def compute(out: Any, fill: float = float("nan")) -> torch.Tensor:
    return reference.compute(out, lambda x, _: x, fill=fill)


@dataclass
class Program:
    """What all ranks mean to do: phases of steps in one order, and who fails where.

    ``failures[step]`` is ``(rank, how)``.
    """

    problems: list[Problem]
    order: list[tuple[str, int]] = field(default_factory=list)
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)


HOW = ("ids", "update", "tokens", "destroyed after sending", "destroyed", "expert", "rows", "destroyed after combining")
FAILS_DISPATCH = ("ids", "update", "tokens")


def random_program(seed: int, world: int, steps: int, layout: EpLayout) -> Program:
    dice = random.Random(seed)
    problems = [
        make_problem(
            dice.randrange(10**6),
            world,
            5,
            4,
            2,
            [dice.choice([0, 1, 2, 3, 20]) for _ in range(world)],
            special="random",
        )
        for _ in range(steps)
    ]
    program = Program(problems)
    # The step before last is over before the next begins; phases are otherwise in any order.
    begun, sent, received, combining = 0, [], [], []
    while begun < steps or sent or received or combining:
        choices = []
        if begun < steps and begun - 2 not in (*sent, *received, *combining):
            choices.append("dispatch")
        choices += ["receive"] * bool(sent) + ["combine"] * bool(received) + ["finish"] * bool(combining)
        what = dice.choice(choices)
        if what == "dispatch":
            sent.append(begun)
            program.order.append((what, begun))
            begun += 1
            continue
        before, after = {
            "receive": (sent, received),
            "combine": (received, combining),
            "finish": (combining, []),
        }[what]
        step = before.pop(dice.randrange(len(before)))
        after.append(step)
        program.order.append((what, step))
    for step in range(steps):
        if dice.random() < 0.35:
            program.failures[step] = dice.randrange(world), dice.choice(HOW)
    return program


def run_program(rank: int, fleet: Fleet, program: Program, seed: int) -> list[Any]:
    """For each step its result, or the error that ended it here."""
    moods, handles, outs = random.Random(1000 * seed + rank), {}, {}
    results: list[Any] = [None] * len(program.problems)
    for what, step in program.order:
        if results[step] is not None:
            continue
        if moods.random() < 0.2:
            time.sleep(moods.random() * 0.002)
        failing, how = program.failures.get(step, (-1, ""))
        how = how if failing == rank else ""
        problem = program.problems[step]
        x, ids, weights = problem.xs[rank], problem.topk_ids[rank], problem.topk_weights[rank]
        knob = HandleAlgoKnobTopKWeights(weights)
        try:
            if what == "dispatch":
                if how == "ids":
                    fleet.create_handle(HandleParams(ids.float()), [knob])
                handles[step] = handle = fleet.create_handle(HandleParams(ids), [knob])
                if how == "update":
                    handle.update(HandleParams(ids.float()), [knob])
                handle.dispatch_send_only(DispatchInputParams([x[:, :-1] if how == "tokens" else x]))
                if how == "destroyed after sending":
                    handle.destroy()
                    results[step] = "gone"
            elif what == "receive":
                outs[step] = handles[step].dispatch_recv_only()
                if how == "destroyed":
                    handles[step].destroy()
                    results[step] = "gone"
            elif what == "combine":
                if how == "expert":
                    handles[step].destroy()
                    results[step] = "gone"
                    continue
                rows = compute(outs[step])
                handles[step].combine_send_only(CombineInputParams([rows[..., :-1] if how == "rows" else rows]))
                if how == "destroyed after combining":
                    handles[step].destroy()
                    results[step] = "gone"
            else:
                results[step] = handles[step].combine_recv_only().x
        except MoEEpError as error:
            results[step] = error
    return results


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, layout: EpLayout) -> None:
    world = 2 + seed % 3
    program = random_program(seed, world, 10, layout)
    params = make_problem(0, world, 5, 4, 2, [20] * world).params(layout)
    by_rank = in_threads(world, lambda rank, fleet: run_program(rank, fleet, program, seed), params)
    for each in by_rank:
        assert isinstance(each, list), each
    for step, problem in enumerate(program.problems):
        got = [results[step] for results in by_rank]
        where = f"step {step} of {program.order}, {program.failures}: {got}"
        if step not in program.failures or program.failures[step][1] == "destroyed after combining":
            gone = program.failures.get(step, (-1, ""))[0]
            want = reference.identity_forward(problem.xs, *problem.routing, problem.num_experts)
            for rank, y in enumerate(got):
                if rank != gone:
                    assert isinstance(y, torch.Tensor), where
                    torch.testing.assert_close(y.double(), want[rank], rtol=0, atol=1e-5)
            continue
        failing, how = program.failures[step]
        for rank, error in enumerate(got):
            if rank == failing:
                assert error == "gone" or isinstance(error, MoEEpConfigError), where
            else:
                assert isinstance(error, MoEEpPeerError) and error.rank == failing, where
                assert ("dispatch" if how in FAILS_DISPATCH else "combine") in str(error), where


@pytest.mark.parametrize("seed", range(12))
def test_every_rank_in_an_order_of_its_own(seed: int) -> None:
    """Ranks wait for one another in circles: nobody hangs, who raises names a peer, and what comes home is right."""
    world, layout = 2 + seed % 3, LAYOUTS[seed % 3]
    program = random_program(seed, world, 8, layout)
    program.failures.clear()
    params = make_problem(0, world, 5, 4, 2, [20] * world).params(layout)

    def body(rank: int, fleet: Fleet) -> list[Any]:
        order = random_program(1000 * seed + rank, world, 8, layout).order
        return run_program(rank, fleet, Program(program.problems, order), seed)

    by_rank = in_threads(world, body, params)
    for step, problem in enumerate(program.problems):
        want = reference.identity_forward(problem.xs, *problem.routing, problem.num_experts)
        for rank, results in enumerate(by_rank):
            got = results[step]
            if isinstance(got, torch.Tensor):
                torch.testing.assert_close(got.double(), want[rank], rtol=0, atol=1e-5)
            else:
                assert isinstance(got, MoEEpPeerError) and got.rank >= 0, got


PROBLEM = make_problem(0, 3, 5, 4, 2, [3, 2, 4])


def dispatch(rank: int, fleet: Fleet) -> Exception | None:
    ids, weights = PROBLEM.topk_ids[rank], PROBLEM.topk_weights[rank]
    with fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) as handle:
        return caught(lambda: handle.dispatch(DispatchInputParams([PROBLEM.xs[rank]])))


def test_a_rank_that_leaves_an_adopted_group_is_named() -> None:
    """The group is the caller's and goes on, so that its end is no sign."""
    _, *errors = in_threads(3, lambda rank, fleet: dispatch(rank, fleet) if rank else None, PROBLEM.params())
    for error in errors:
        assert isinstance(error, MoEEpPeerError) and error.rank == 0 and "rank 0 has left" in str(error), error


def test_an_adopted_group_that_gives_up_first_is_told() -> None:
    met = threading.Barrier(3)

    def body(rank: int, fleet: Fleet) -> Any:
        errors = [dispatch(rank, fleet) for _ in range(2)] if rank else []
        met.wait(30)
        return errors

    _, *by_rank = in_threads(3, body, PROBLEM.params(), limit_s=0.7)
    for errors in by_rank:
        assert isinstance(errors[0], MoEEpTimeoutError) and 0 in errors[0].ranks, errors
        assert "the process group gave a collective up before BootstrapConfig.timeout_s was over" in str(errors[0])
        assert str(errors[1]) == str(errors[0])
