"""How a rank measures: what a candidate is, and the calls that the run makes on every rank.

A step of any candidate starts behind the same barrier, which is not timed, and is timed by this rank's own clock or its
GPU's events. The barrier is one over shared memory, where there is one: ranks that leave a barrier one after the other,
as gloo's lets them, would be timed waiting for each other. The run takes the slowest rank of each step.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..config import BootstrapConfig
from ..fleet import Meeting
from ..launch.devices import take_device
from ..substrate.control import Operation
from ..substrate.faults import FaultState
from ..substrate.futex import unsupported_reason
from ..substrate.group import HostGroup
from .cases import ROUTINGS

Times: TypeAlias = tuple[float, ...]
"""Seconds of each of a case's ``phases``; ``nan`` for one that this candidate does not tell apart."""


class Candidate(ABC):
    """One way to run the steps of a case. All ranks call everything in the same order."""

    def prepare(self, number: int, validate: bool) -> float | None:
        """Run a step for what later steps reuse: touched memory, experts' rows.

        Returns:
            The largest error of its result in multiples of what is allowed, if it has one and ``validate``.
        """
        self.step(number)
        return None

    @abstractmethod
    def step(self, number: int) -> Times:
        """Run a timed step with routing ``number % ROUTINGS``."""

    def close(self) -> None:  # noqa: B027 - optional
        """Give everything back."""


Build: TypeAlias = Callable[[str, Any, BootstrapConfig], Candidate]
"""Makes a candidate from its name, the case and this rank."""


class Barrier:
    """All ranks come before any goes, with as little between their goings as the cores allow."""

    def __init__(self, bootstrap: BootstrapConfig) -> None:
        rank, world = bootstrap.rank, bootstrap.world_size
        self._peers = [peer for peer in range(world) if peer != rank]
        self._turn = 0
        self._group: HostGroup | None = None
        if world > 1 and not unsupported_reason():
            meeting = Meeting(bootstrap)
            self._group = HostGroup(
                rank,
                world,
                size=mmap.PAGESIZE,
                align=mmap.PAGESIZE,
                exchange=meeting.exchange,
                incarnation=meeting.incarnation,
                spin_s=None,
                timeout_s=bootstrap.timeout_s,
                silence_s=bootstrap.timeout_s,
                faults=FaultState(rank, world),
            )

    def pass_through(self) -> None:
        self._turn += 1
        if self._group is None:
            dist.barrier()
        else:
            self._group.waiter.commit(Operation.DISPATCH, self._turn)
            self._group.waiter.wait(self._peers, Operation.DISPATCH, self._turn)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


_barriers: list[Barrier] = []
_candidates: dict[str, Candidate] = {}
"""What this process keeps from :func:`open_case` to :func:`close_case`."""


def join(mine: BootstrapConfig, backend: str, gpu: torch.device | None = None) -> None:
    """Meet the other ranks in the default process group; ``gpu``: the one whose tensors it is for."""
    dist.init_process_group(
        backend,
        store=mine.tcp_store,
        rank=mine.rank,
        world_size=mine.world_size,
        timeout=timedelta(seconds=mine.timeout_s),
        device_id=gpu,
    )


def open_case(
    bootstrap: BootstrapConfig, build: Build, case: Any, names: Sequence[str], timeout_s: float, device: str
) -> None:
    """Build all candidates of a case side by side, on this rank's ``device``."""
    with _leaving_on_error():
        mine = replace(take_device(bootstrap, device), timeout_s=timeout_s)
        join(mine, "gloo")
        _barriers.append(Barrier(mine))
        if device == "cpu":  # the gloo group is no group for GPU tensors
            mine = replace(mine, process_group=dist.group.WORLD)
        for name in names:
            _candidates[name] = build(name, case, mine)


def prepare(bootstrap: BootstrapConfig, validate: bool) -> dict[str, float]:
    """Run each routing once on each candidate, with the experts' work.

    Returns:
        Per transport its largest error in multiples of what is allowed; empty unless ``validate``.
    """
    with _leaving_on_error():
        worst: dict[str, float] = {}
        for name, candidate in _candidates.items():
            errors = [candidate.prepare(number, validate) for number in range(ROUTINGS)]
            if known := [error for error in errors if error is not None]:
                worst[name] = max(known)
        return worst


def run_round(bootstrap: BootstrapConfig, number: int, warmup: int, steps: int) -> dict[str, npt.NDArray[np.float64]]:
    """A batch of steps of every candidate, in an order that rotates with the round's ``number``.

    Returns:
        Per candidate seconds ``[steps, P]`` of this rank: a column for each of the case's ``phases``.
    """
    with _leaving_on_error():
        first = number * (warmup + steps)
        names = list(_candidates)
        turn = number % len(names)
        return {name: _batch(_candidates[name], first, warmup, steps) for name in names[turn:] + names[:turn]}


def close_case(bootstrap: BootstrapConfig) -> None:
    """Let go of all that :func:`open_case` made."""
    _close()


def _close() -> None:
    for candidate in _candidates.values():
        candidate.close()
    _candidates.clear()
    for barrier in _barriers:
        barrier.close()
    _barriers.clear()
    gc.collect()  # handles know themselves, and through their Fleet its memory
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


def _batch(candidate: Candidate, first: int, warmup: int, steps: int) -> npt.NDArray[np.float64]:
    barrier, times = _barriers[-1], []
    for index in range(warmup + steps):
        barrier.pass_through()
        times.append(candidate.step(first + index))
    return np.array(times[warmup:])


@contextlib.contextmanager
def _leaving_on_error() -> Iterator[None]:
    """A rank that fails leaves, so that its peers do not wait for it at a barrier."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            _close()
        raise
