"""How a rank measures on the CPU: the candidates, and the calls that the run makes on every rank.

A step of any candidate starts behind the same barrier, which is not timed, and is timed by this rank's own clock. The
barrier is one over shared memory, where there is one: ranks that leave a barrier one after the other, as gloo's lets
them, would be timed waiting for each other. The run takes the slowest rank of each step.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..config import BootstrapConfig
from ..fleet import Meeting, create_fleet
from ..kernels import get_kernel
from ..knobs import HandleAlgoKnobTopKWeights
from ..reference import identity_forward, tolerance
from ..substrate.control import Operation
from ..substrate.faults import FaultState
from ..substrate.futex import unsupported_reason
from ..substrate.group import HostGroup
from ..tensors import CombineInputParams, DispatchInputParams, DispatchOutput, HandleParams
from .cases import GLOO_RAW, ROUTINGS, CombineInput, CommCase

Times: TypeAlias = tuple[float, ...]
"""Seconds of each of a case's ``phases``."""


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


class TransportCandidate(Candidate):
    """A transport's update, dispatch and combine.

    The experts' rows are in place before combine, as a kernel would leave them: :meth:`prepare` wrote them.
    """

    def __init__(self, name: str, case: CommCase, bootstrap: BootstrapConfig) -> None:
        self._case = case
        self._fleet = create_fleet(bootstrap, case.params, backend=name)  # first: it says where memory is too small
        self._x = case.x(bootstrap.rank)
        self._routed = [case.routed(bootstrap.rank, number) for number in range(ROUTINGS)]
        self._updates = [(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) for ids, weights in self._routed]
        self._input = DispatchInputParams([self._x])
        self._kernel = get_kernel("identity")
        self._tensor: torch.Tensor | None = None
        self._handle = self._fleet.create_handle(*self._updates[0])

    def prepare(self, number: int, validate: bool) -> float | None:
        self._handle.update(*self._updates[number % ROUTINGS])
        arrived = self._handle.dispatch(self._input)
        rows = self._kernel.compute(arrived, self._case.layout, None, into=self._rows(arrived))
        y = self._handle.combine(CombineInputParams([rows])).x
        return self._error(y, number) if validate else None

    def step(self, number: int) -> Times:
        update = self._updates[number % ROUTINGS]
        start = perf_counter()
        self._handle.update(*update)
        arrived = self._handle.dispatch(self._input)
        middle = perf_counter()
        self._handle.combine(CombineInputParams([self._rows(arrived)]))
        return _phases(start, middle, perf_counter())

    def close(self) -> None:
        self._handle.destroy()
        self._fleet.destroy()

    def _rows(self, arrived: DispatchOutput) -> torch.Tensor:
        """Where the experts' rows are: in the transport's buffer; where it has none, the received rows go back.

        A transport without a buffer reads any tensor in place, and the yardstick sends back what it received as well.
        """
        if self._case.combine_input is CombineInput.BUFFER:
            buffer = self._handle.combine_buffer()
            return arrived.expert_tensors if buffer is None else buffer
        if self._tensor is None:
            self._tensor = torch.empty_like(arrived.expert_tensors)
        return self._tensor

    def _error(self, y: torch.Tensor, number: int) -> float:
        if not y.numel():
            return 0.0
        ids, weights = self._routed[number % ROUTINGS]
        (expected,) = identity_forward([self._x], [ids], [weights], self._case.experts)
        assert expected is not None, "nobody is masked"
        largest = float(self._x.abs().max())
        allowed = tolerance(self._case.dtype, self._case.world, self._case.topk, largest)
        error = float((y.double() - expected).abs().max()) / allowed
        return math.inf if math.isnan(error) else error


class GlooRawCandidate(Candidate):
    """The yardstick: two bare gloo all-to-alls that move a step's rows there and back.

    Nothing is packed, unpacked or summed, and the routing is known to all beforehand.
    """

    def __init__(self, case: CommCase, rank: int) -> None:
        splits = [(rows[rank].tolist(), rows[:, rank].tolist()) for rows in map(case.rows, range(ROUTINGS))]
        home = torch.ones(max(sum(there) for there, _ in splits), case.hidden, dtype=case.dtype)
        away = torch.ones(max(sum(here) for _, here in splits), case.hidden, dtype=case.dtype)
        self._moves = [(home[: sum(there)], there, away[: sum(here)], here) for there, here in splits]

    def step(self, number: int) -> Times:
        home, there, away, here = self._moves[number % ROUTINGS]
        start = perf_counter()
        dist.all_to_all_single(away, home, here, there)
        middle = perf_counter()
        dist.all_to_all_single(home, away, there, here)
        return _phases(start, middle, perf_counter())


def comm_candidate(name: str, case: CommCase, bootstrap: BootstrapConfig) -> Candidate:
    """The candidate of this name."""
    if name == GLOO_RAW:
        return GlooRawCandidate(case, bootstrap.rank)
    return TransportCandidate(name, case, bootstrap)


def _phases(start: float, middle: float, end: float) -> Times:
    return middle - start, end - middle, end - start


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


def open_case(bootstrap: BootstrapConfig, build: Build, case: CommCase, names: Sequence[str], timeout_s: float) -> None:
    """Build all candidates of a case side by side."""
    with _leaving_on_error():
        dist.init_process_group(
            "gloo",
            store=bootstrap.tcp_store,
            rank=bootstrap.rank,
            world_size=bootstrap.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        group = dist.group.WORLD
        mine = replace(bootstrap, device="cpu", process_group=group, timeout_s=timeout_s)
        _barriers.append(Barrier(mine))
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
