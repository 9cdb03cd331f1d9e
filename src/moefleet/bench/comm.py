"""The run: all cases of a world on one set of ranks, every candidate of a case in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from ..config import BootstrapConfig
from ..errors import (
    MoEEpError,
    MoEEpNotBuiltError,
    MoEEpPeerError,
    MoEEpTimeoutError,
    MoEEpUnknownBackendError,
    config_error,
)
from ..fleet import available_backends, probe
from ..launch import RankPool
from ..launch.pool import usable_cores
from ..launch.torchrun import TorchrunPool, ranks
from . import cpu, rank
from .cases import GLOO_RAW, GRAPH, CommCase
from .layers import LayerCase


@dataclass(frozen=True)
class CommPlan:
    """What to run.

    Args:
        cases: of one kind; those of the same ``world`` side by side.
        transports: names, in the order of the report; empty means all that are registered, then the yardsticks.
        steps: timed steps of a candidate in each round; warmup: untimed ones before them.
        rounds: how often the candidates of a case take turns.
        validate: compare every transport's output with the reference, before and after the timed steps.
        threads: of each rank; ``None`` divides the cores.
        timeout_s: for each call on the ranks: opening a case, or one round of it.
        build: makes the candidates on a rank.
        device: of the ranks' tensors: ``"cpu"``, or ``"cuda"`` for a GPU each.

    Raises:
        MoEEpConfigError: a value is out of range.
    """

    cases: Sequence[CommCase]
    transports: Sequence[str] = ()
    steps: int = 10
    warmup: int = 2
    rounds: int = 10
    validate: bool = False
    threads: int | None = None
    timeout_s: float = 120.0
    build: rank.Build = cpu.comm_candidate
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
            if getattr(self, name) < least:
                raise config_error(name, getattr(self, name), f"at least {least}")

    @property
    def ticks(self) -> int:
        """How often :func:`measure` reports progress."""
        return len(self.cases) * (self.rounds + 1)

    def names(self, case: CommCase) -> list[str]:
        """The candidates of a case."""
        return candidates_for(case, self.transports, self.device)[0]

    def facts(self, case: CommCase) -> dict[str, Any]:
        """What a record of this case says before anything is measured."""
        threads = self.threads or max(1, usable_cores() // case.world)
        how = {"rounds": self.rounds, "warmup": self.warmup, "threads": threads, "device": self.device}
        return {**case.facts, **how}


@dataclass
class CaseResult:
    """What one case gave.

    Attributes:
        seconds: per candidate ``[rounds * steps, P]``: the slowest rank's time of each step, a column per phase,
            ``nan`` in those that this candidate does not tell apart.
        left_out: per candidate that cannot run this case, the reason.
        errors: per transport the largest error in multiples of what is allowed; empty unless validated.
    """

    case: CommCase
    seconds: dict[str, npt.NDArray[np.float64]]
    left_out: dict[str, str]
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, float]:
        """The transports whose output was wrong, and by how much."""
        return {name: error for name, error in self.errors.items() if not error <= 1}

    def medians_us(self, name: str) -> dict[str, float]:
        """The median of each phase of one candidate; empty for one that did not run."""
        if name not in self.seconds:
            return {}
        return dict(zip(self.case.phases, (np.median(self.seconds[name], axis=0) * 1e6).tolist()))

    @property
    def complaints(self) -> list[str]:
        """What to tell of those."""
        return [
            f"{name}, {self.case}: output is off by {error:.3g} times what rounding allows"
            for name, error in self.wrong.items()
        ]


def measure(plan: CommPlan, on_tick: Callable[[CommCase], None] = lambda case: None) -> Iterator[CaseResult]:
    """Run all cases, on one set of ranks for each world.

    Raises:
        MoEEpNotBuiltError: a case that no candidate can run.
        MoEEpError: what a rank raised.
    """
    who = [candidates_for(case, plan.transports, plan.device) for case in plan.cases]
    for world, cases in groupby(zip(plan.cases, who), key=lambda pair: pair[0].world):
        with ranks(world, threads_per_rank=plan.threads) as pool:
            for case, (names, left_out) in cases:
                yield _measure_case(plan, case, names, left_out, pool, on_tick)


def candidates_for(case: CommCase, wanted: Sequence[str] = (), device: str = "cpu") -> tuple[list[str], dict[str, str]]:
    """The candidates that can run a case, and for the others the reason why not.

    Raises:
        MoEEpUnknownBackendError: a name that nobody has registered.
        MoEEpNotBuiltError: there is none.
    """
    names, left_out = [], {}
    known = [*available_backends(), *case.yardsticks]
    if device == "cuda" and isinstance(case, LayerCase):  # bench comm captures by itself, see gpu.py
        known = [each for name in known for each in (name, name + GRAPH)]
    for name in wanted or known:
        if name not in known:
            raise config_error("transport", repr(name), ", ".join(known), cls=MoEEpUnknownBackendError)
        reason = _why_not(name, case, device)
        if reason and name.removesuffix(GRAPH) in left_out and not wanted:
            continue  # there is no such transport here at all
        if reason:
            left_out[name] = reason
        else:
            names.append(name)
    if not names:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise MoEEpNotBuiltError(f"nothing here can run {case.layout.value} on {case.world} ranks: {reasons}")
    return names, left_out


def _why_not(name: str, case: CommCase, device: str) -> str:
    if name == GLOO_RAW:
        return "" if dist.is_gloo_available() else "this build of torch has no gloo"
    transport, graph, _ = name.partition(GRAPH)
    capability = probe(transport, BootstrapConfig(case.world, 0, device=device), case.params)
    if graph and isinstance(case, LayerCase) and not capability.reason:
        return case.why_not_captured if "graphs" in capability.features else "its steps need the host in between"
    return capability.reason


def _measure_case(
    plan: CommPlan,
    case: CommCase,
    names: list[str],
    left_out: dict[str, str],
    pool: RankPool | TorchrunPool,
    on_tick: Callable[[CommCase], None],
) -> CaseResult:
    def on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values_of(pool.run(fn, *args, timeout_s=plan.timeout_s))

    on_ranks(rank.open_case, plan.build, case, names, plan.timeout_s, plan.device)
    errors = on_ranks(rank.prepare, plan.validate)
    on_tick(case)
    rounds = []
    for number in range(plan.rounds):
        rounds.append(on_ranks(rank.run_round, number, plan.warmup, plan.steps))
        on_tick(case)
    if plan.validate:
        errors += on_ranks(rank.prepare, True)
    on_ranks(rank.close_case)
    seconds = {
        name: np.concatenate([np.max([times[name] for times in of_ranks], axis=0) for of_ranks in rounds])
        for name in names
    }
    worst = {name: max(error[name] for error in errors) for name in errors[0]}
    return CaseResult(case, seconds, left_out, worst)


def values_of(results: Sequence[Any]) -> list[Any]:
    """What the ranks returned, or the error behind all errors: a rank's own before those of its peers."""
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise min(failed, key=_distance)
    return [result.value for result in results]


def _distance(error: Exception) -> int:
    """How far an error is from the cause."""
    if isinstance(error, (MoEEpPeerError, MoEEpTimeoutError)):
        return 1
    if isinstance(error, MoEEpError):
        return 0
    return 2 if isinstance(error, RuntimeError) else 0  # gloo says so where a peer has left
