"""The candidates of ``bench comm`` on the CPU."""

from __future__ import annotations

import math
from time import perf_counter

import torch
import torch.distributed as dist

from ..config import BootstrapConfig
from ..fleet import create_fleet
from ..kernels import get_kernel
from ..knobs import HandleAlgoKnobTopKWeights
from ..reference import identity_forward, tolerance
from ..tensors import CombineInputParams, DispatchInputParams, DispatchOutput, HandleParams
from .cases import GLOO_RAW, ROUTINGS, CombineInput, CommCase
from .rank import Candidate, Times


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
