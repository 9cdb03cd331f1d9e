"""The run of ``bench model``: ranks beside the unmodified model in one process, in turn, on the same cores.

On GPUs the process has one, which is the first rank's as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import BootstrapConfig
from ..demo.run import PRELOAD
from ..errors import MoEEpNotBuiltError, MoEEpUnknownBackendError, config_error
from ..fleet import available_backends, probe
from ..launch import RankPool
from ..launch.pool import usable_cores
from ..launch.torchrun import TorchrunPool, ranks
from ..timing import PHASES
from . import generation
from .comm import values_of
from .generation import ALONE, ModelCase, Text
from .records import ModelRecord, Record, build


@dataclass(frozen=True)
class ModelPlan:
    """What to run.

    Args:
        cases: those of the same ``world`` side by side.
        transports: names; empty means the one that "auto" takes.
        rounds: how often the candidates of a case take turns, a whole generation each; warmup: untimed ones before.
        validate: compare tokens with the unmodified model's.
        threads: of each rank; ``None`` divides the cores. The unmodified model has those of all ranks together.
        alone_threads: or this many.
        timeout_s: for loading a case, and for each generation.
    """

    cases: Sequence[ModelCase]
    transports: Sequence[str] = ()
    rounds: int = 10
    warmup: int = 1
    validate: bool = False
    threads: int | None = None
    alone_threads: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise config_error(name, getattr(self, name), f"at least {least}")

    @property
    def ticks(self) -> int:
        """How often :func:`measure` reports progress."""
        return len(self.cases) * (self.warmup + self.rounds + 1)

    def names(self, case: ModelCase) -> list[str]:
        """The candidates of a case."""
        return [ALONE, *self.transports_of(case)]

    def transports_of(self, case: ModelCase) -> list[str]:
        """Those that were asked for, or the first that can run it."""
        known = available_backends()
        for name in self.transports:
            if name not in known:
                raise config_error("transport", repr(name), ", ".join(known), cls=MoEEpUnknownBackendError)
        reasons = {name: _why_not(name, case) for name in self.transports or known}
        usable = [name for name, reason in reasons.items() if not reason]
        if not usable or (self.transports and len(usable) < len(reasons)):
            said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
            raise MoEEpNotBuiltError(f"cannot run {case}: {said}")
        return usable if self.transports else usable[:1]

    def threads_of(self, case: ModelCase) -> tuple[int, int]:
        """Threads of each rank, and of the unmodified model."""
        threads = self.threads or max(1, usable_cores() // case.world)
        return threads, self.alone_threads or threads * case.world

    def facts(self, case: ModelCase) -> dict[str, Any]:
        """What a record of this case says before anything is measured."""
        threads, alone = self.threads_of(case)
        return {**case.facts, "rounds": self.rounds, "warmup": self.warmup, "threads": threads, "alone_threads": alone}


@dataclass
class ModelResult:
    """What one case gave.

    Attributes:
        seconds: per candidate and phase the time of each step or run, as :class:`ModelRecord` has them.
        wrong: per transport how many sequences differ from the unmodified model's; empty unless validated.
    """

    case: ModelCase
    seconds: dict[str, dict[str, npt.NDArray[np.float64]]]
    wrong: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def complaints(self) -> list[str]:
        """What to tell of wrong output."""
        return [
            f"{name}, {self.case}: {count} of {self.case.batch} texts are not those of the unmodified model"
            for name, count in self.wrong.items()
            if count
        ]


def measure(plan: ModelPlan, on_tick: Callable[[ModelCase], None] = lambda case: None) -> Iterator[ModelResult]:
    """Run all cases, on one set of ranks for each world, and one more process for the unmodified model.

    Raises:
        MoEEpNotBuiltError: a case that no transport can run.
        MoEEpError: what a rank raised.
    """
    names = [plan.transports_of(case) for case in plan.cases]
    for world, cases in groupby(zip(plan.cases, names), key=lambda pair: pair[0].world):
        together = list(cases)
        threads, alone_threads = plan.threads_of(together[0][0])
        with (
            ranks(1, threads_per_rank=alone_threads) as alone,
            ranks(world, threads_per_rank=threads, preload=PRELOAD) as spread,
        ):
            for case, transports in together:
                yield _measure_case(plan, case, transports, alone, spread, on_tick)


def _why_not(name: str, case: ModelCase) -> str:
    capability = probe(name, BootstrapConfig(case.world, 0, device=case.device))
    if capability.available and capability.limits and case.device not in capability.limits.device_types:
        return f"it is for {' and '.join(sorted(capability.limits.device_types))} tensors"
    return capability.reason


def _measure_case(
    plan: ModelPlan,
    case: ModelCase,
    transports: list[str],
    alone: RankPool | TorchrunPool,
    spread: RankPool | TorchrunPool,
    on_tick: Callable[[ModelCase], None],
) -> ModelResult:
    def on(pool: RankPool | TorchrunPool, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values_of(pool.run(fn, *args, timeout_s=plan.timeout_s))

    def generate(name: str, *, timed: bool = False) -> list[Text]:
        if name == ALONE:
            return on(alone, generation.generate_alone, case)
        return on(spread, generation.generate_on_rank, case, name, timed)

    on(alone, generation.open_alone, case)
    on(spread, generation.open_ranks, case, transports, plan.timeout_s)
    on_tick(case)
    names = [ALONE, *transports]
    plain: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in names}
    timed: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in transports}
    texts: dict[str, list[list[int]]] = {}
    for number in range(plan.warmup + plan.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            of_ranks = generate(name)
            texts[name] = [tokens for text in of_ranks for tokens in text["tokens"]]
            if number < plan.warmup:
                continue
            plain[name].append(np.stack([text["seconds"] for text in of_ranks]))
            if name != ALONE:
                timed[name].append(np.mean([_phases(text) for text in generate(name, timed=True)], axis=0))
        on_tick(case)
    on(alone, generation.close_case)
    on(spread, generation.close_case)
    seconds = {name: _by_phase(plain[name], timed.get(name, [])) for name in names}
    wrong = {name: _differences(texts[ALONE], texts[name]) for name in transports} if plan.validate else {}
    return ModelResult(case, seconds, wrong)


def _phases(text: Text) -> npt.NDArray[np.float64]:
    """``[N - 1, 5]``: of each decode step the phases, and the rest."""
    rest = text["seconds"] - text["phases"].sum(1)
    return np.concatenate([text["phases"], rest[:, None]], axis=1)[1:]


def _by_phase(
    plain: list[npt.NDArray[np.float64]], timed: list[npt.NDArray[np.float64]]
) -> dict[str, npt.NDArray[np.float64]]:
    runs = np.stack(plain)  # [rounds, ranks, N]
    slowest = runs.max(1)
    found = {"run": runs.sum(2).max(1), "prefill": slowest[:, 0], "decode": slowest[:, 1:].ravel()}
    if timed:
        found |= zip((*PHASES, "rest"), np.concatenate(timed).T)
    return found


def _differences(expected: list[list[int]], got: list[list[int]]) -> int:
    return sum(one != other for one, other in zip(expected, got, strict=True))


def records(plan: ModelPlan, result: ModelResult) -> list[Record]:
    """All records of one case."""
    case = result.case
    tokens = {"run": case.batch * case.new_tokens, "decode": case.batch}

    def more(name: str, phase: str, median_us: float) -> dict[str, Any]:
        return {"tokens_per_second": round(tokens[phase] / median_us * 1e6, 2) if phase in tokens else None}

    valid = {name: not count for name, count in result.wrong.items()}
    return [*build(ModelRecord, plan.facts(case), result.seconds, valid, more)]
