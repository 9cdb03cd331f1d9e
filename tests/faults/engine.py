"""A rank of this suite: a layer over a fault-tolerant Fleet, steps whose data follows from their number, and a log.

The parent knows from a step's number what every rank brought to it, so it can hold each delivered output against the
reference under the mask that was in force.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from moefleet import (
    BootstrapConfig,
    EpLayout,
    FleetAlgoKnobFaultTolerance,
    FleetAlgoKnobTopologyCapacity,
    MoEEpLayer,
    MoEEpTensors,
    SplitConfig,
    UnquantizedMoEWeights,
    reference,
)
from moefleet.config import CommConfig
from moefleet.placement import Placement
from tests.faults.forked import KILLED, run_forked
from tests.strategies import Problem, make_problem

EXPERTS, HIDDEN, TOPK = 9, 8, 3
LARGEST = 16.0
"""No element of an expert's row or of an output is larger."""
BUILD_S = 60.0
"""Longest wait for building a Fleet: only a hang takes that long."""
FOREVER_S = 40.0
"""Longest wait for something that another rank does."""
UNDISTURBED_MS = 30_000
"""No rank that lives is silent for so long, however busy the machine is. Deaths are seen at once."""


def problem_of(step: int, world: int) -> Problem:
    """What all ranks bring to step ``step``. Ranks without tokens occur."""
    tokens = [(step + 2 * rank) % 5 for rank in range(world)]
    return make_problem(step, world, EXPERTS, HIDDEN, TOPK, tokens)


def all_weights() -> tuple[torch.Tensor, torch.Tensor]:
    return problem_of(1, 1).weights(intermediate=4, seed=99)


def weights_of(placement: Placement, rank: int) -> UnquantizedMoEWeights:
    w13, w2 = all_weights()
    held = list(placement.experts_of(rank))
    return UnquantizedMoEWeights(w13[held], w2[held])


@dataclass(frozen=True)
class Record:
    """One step on one rank. ``output`` is ``None`` where the step was flagged: nothing left the engine."""

    step: int
    mask: list[int]
    output: torch.Tensor | None

    @property
    def flagged(self) -> bool:
        return self.output is None


class Engine:
    """What an engine does with a layer: step, look at the flag, deliver or reconcile.

    Args:
        bootstrap: of the call; keyword arguments ``world`` and ``rank`` replace its own.
        comm: the transport.
        timeout_ms, knob: fields of the fault-tolerance knob.
    """

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        layout: EpLayout = EpLayout.EXPERT_MAJOR,
        *,
        world: int | None = None,
        rank: int | None = None,
        capacity: int | None = None,
        comm: str | CommConfig = "shm",
        timeout_ms: int = UNDISTURBED_MS,
        **knob: Any,
    ) -> None:
        self.store = bootstrap.tcp_store
        self.bootstrap = replace(
            bootstrap, world_size=world or bootstrap.world_size, rank=bootstrap.rank if rank is None else rank,
            timeout_s=BUILD_S,
        )  # fmt: skip
        knobs: list[Any] = [FleetAlgoKnobFaultTolerance(timeout_ms=timeout_ms, **knob)]
        if capacity is not None:
            knobs.append(FleetAlgoKnobTopologyCapacity(capacity))
        params = problem_of(1, self.world).params(layout, max_tokens_per_rank=5)
        weights = weights_of(Placement.contiguous(EXPERTS, self.world), self.rank)
        self.layer = MoEEpLayer(self.bootstrap, params, weights, knobs, SplitConfig(comm, "grouped_gemm"))
        self.fleet: Any = self.layer.fleet
        self.log: list[Record] = []

    @property
    def world(self) -> int:
        return self.bootstrap.world_size

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    def forward(self) -> torch.Tensor:
        """The next step's output, looked at by nobody."""
        problem = problem_of(self.fleet.stats()["steps"] + 1, self.world)
        mine = problem.xs[self.rank], problem.topk_ids[self.rank], problem.topk_weights[self.rank]
        return self.layer(MoEEpTensors(*mine))

    def step(self) -> bool:
        """One step, logged. Whether it was flagged."""
        output: torch.Tensor | None = self.forward()
        if self.fleet.query_fault():
            output = None
        self.log.append(Record(self.fleet.stats()["steps"], self.fleet.query_active_mask().tolist(), output))
        return output is None

    def serve(self, until: int, **reconcile: Any) -> None:
        """Run steps up to number ``until``; agree on a mask after each flagged one."""
        while self.fleet.stats()["steps"] < until:
            if self.step():
                self.fleet.reconcile_active_mask(**reconcile)

    # Words between ranks, outside of what is tested.

    def meet(self, name: str, count: int | None = None) -> None:
        """Wait until ``count`` ranks (default: all) are here. Each name serves once."""
        if self.store.add(f"meet/{name}", 1) == (count or self.world):
            self.store.set(f"met/{name}", "")
        self.store.wait([f"met/{name}"], timedelta(seconds=FOREVER_S))

    def tell(self, name: str, value: object = "") -> None:
        self.store.set(f"told/{name}", str(value))

    def told(self, name: str) -> str:
        """Wait for what somebody tells."""
        self.store.wait([f"told/{name}"], timedelta(seconds=FOREVER_S))
        return self.store.get(f"told/{name}").decode()

    def close(self) -> list[Record]:
        """Leave together with whoever is alive, so that nobody sees another leave. The log."""
        self.layer.destroy()
        return self.log


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def stop_here(engine: Engine, name: str) -> None:
    """Stop this process until another rank calls :func:`go_on` with the same name."""
    engine.tell(name, os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def go_on(engine: Engine, name: str) -> None:
    os.kill(int(engine.told(name)), signal.SIGCONT)


# The parent's side.


def run(fn: Any, *args: Any, world: int = 4, dead: Sequence[int] = (), timeout_s: float = 60.0) -> list[Any]:
    """Every rank's value, ``None`` for those in ``dead``, which must have been killed. Errors fail the test."""
    values = run_forked(fn, args, world, timeout_s)
    failed = {rank: value for rank, value in enumerate(values) if isinstance(value, Exception)}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
    assert [rank for rank, value in enumerate(values) if value is KILLED] == sorted(dead)
    return [None if value is KILLED else value for value in values]


def check_delivered(logs: Sequence[list[Record] | None], renormalize: bool = False) -> int:
    """Hold every delivered output against the reference under its mask; ranks agree on masks. How many there were."""
    world, count = len(logs), 0
    masks: dict[int, list[int]] = {}
    for rank, log in enumerate(logs):
        for record in log or []:
            if record.output is None:
                continue
            assert masks.setdefault(record.step, record.mask) == record.mask, (record.step, rank)
            expected = expected_of(record, world, renormalize)[rank]
            allowed = reference.tolerance(torch.float32, world, TOPK, LARGEST)
            torch.testing.assert_close(record.output.double(), expected, rtol=0, atol=allowed)
            count += 1
    return count


def expected_of(record: Record, world: int, renormalize: bool = False) -> list[Any]:
    problem = problem_of(record.step, world)
    return reference.forward(problem.xs, *problem.routing, *all_weights(), mask=record.mask, renormalize=renormalize)


def healthy(rank: int, step: int, layout: EpLayout, world: int = 4) -> torch.Tensor:
    """Bits of a step that nothing disturbed."""
    key = (layout, world)
    if key not in _healthy:
        _healthy[key] = run(_undisturbed, layout, world=world)
    return _healthy[key][rank][step - 1].output


HEALTHY_STEPS = 30
_healthy: dict[tuple[EpLayout, int], list[list[Record]]] = {}


def _undisturbed(bootstrap: BootstrapConfig, layout: EpLayout) -> list[Record]:
    engine = Engine(bootstrap, layout)
    engine.serve(HEALTHY_STEPS)
    engine.meet("end")
    return engine.close()
