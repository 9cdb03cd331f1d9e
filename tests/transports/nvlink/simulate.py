"""All ranks of a step in one process: CPU memory as the shared memory, kernels under Triton's interpreter.

Programs run one after the other there, so all ranks send before any receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moefleet.config import EpLayout, FleetParams
from moefleet.knobs import FleetAlgoKnob
from moefleet.placement import Placement
from moefleet.tensors import DispatchOutput
from moefleet.transports.nvlink.engine import Engine, Grids
from moefleet.transports.nvlink.geometry import Geometry
from moefleet.transports.nvlink.outputs import OutputViews
from tests.strategies import Problem
from tests.transports.nvlink import interpreter  # noqa: F401 - the kernels run under it

GRIDS = (Grids(2, 2, 1), Grids(2, 2, 1))
SPLIT_GRIDS = (Grids(4, 1, 1), Grids(3, 2, 1))


class World:
    """``W`` engines over one process's memory. ``staged``: inputs become NaN between the halves."""

    def __init__(
        self,
        params: FleetParams,
        world: int,
        placement: Placement | None = None,
        grids: tuple[Grids, Grids] = GRIDS,
        knobs: tuple[FleetAlgoKnob, ...] = (),
        staged: bool = False,
        **faults: bool,
    ) -> None:
        placement = placement or Placement.contiguous(params.num_experts, world)
        shapes = [Geometry.of(params, placement, rank, knobs) for rank in range(world)]
        self.params, self._staged = params, staged
        self.memory = [torch.zeros(g.shared_bytes + 128, dtype=torch.uint8) for g in shapes]
        addresses = [-(-m.data_ptr() // 128) * 128 for m in self.memory]
        self.engines = [Engine(g, torch.device("cpu"), addresses, *grids, timeout_s=1.0, **faults) for g in shapes]
        self.views = [OutputViews(engine) for engine in self.engines]

    def update(self, problem: Problem) -> list[torch.Tensor]:
        """A new slot per rank with its routing."""
        slots = []
        for engine, ids, weights in zip(self.engines, *problem.routing):
            slots.append(engine.take_slot())
            engine.bind_update(slots[-1], ids, weights)(0, ids, weights)
        return slots

    def dispatch(
        self,
        slots: list[torch.Tensor],
        problem: Problem,
        which: int = 0,
        skip: tuple[int, ...] = (),
        scales: Sequence[torch.Tensor] | None = None,
    ) -> list[DispatchOutput]:
        """Every rank's rows, then every rank's receipt, into output set ``which``; ranks in ``skip`` do nothing."""
        for send in (True, False):
            for rank, (engine, slot, x) in enumerate(zip(self.engines, slots, problem.xs)):
                if rank not in skip:
                    output = engine.outputs[which]
                    if send:
                        output.rows.fill_(255)  # NaN
                    given = () if scales is None else (scales[rank],)
                    kind = None if scales is None else scales[rank]
                    launch = engine.bind_dispatch(slot, x, problem.topk, output, send, not send, kind, self._staged)
                    launch(0, x if send or not self._staged else x.new_full(x.shape, float("nan")), *given)
        scale_dtype = None if scales is None else scales[0].dtype
        return [v.of(which, problem.xs[0].dtype, problem.topk, scale_dtype) for v in self.views]

    def combine(
        self, slots: list[torch.Tensor], problem: Problem, rows: list[torch.Tensor], skip: tuple[int, ...] = ()
    ) -> list[torch.Tensor]:
        """The experts' rows home."""
        outs = [torch.full(x.shape, float("nan"), dtype=rows[0].dtype) for x in problem.xs]
        for send in (True, False):
            for rank, (engine, slot) in enumerate(zip(self.engines, slots)):
                if rank not in skip:
                    y = rows[rank]
                    launch = engine.bind_combine(slot, y, outs[rank], problem.topk, send, not send, self._staged)
                    launch(0, y if send or not self._staged else torch.full_like(y, float("nan")), outs[rank])
        return outs

    def alarms(self) -> list[int]:
        """Every rank's error word."""
        return [int(engine.alarm[0]) for engine in self.engines]


def shared_words(world: World, rank: int, offset: int, count: int, dtype: torch.dtype, parity: int) -> torch.Tensor:
    """Part of a rank's shared memory."""
    memory = world.memory[rank]
    start = -memory.data_ptr() % 128 + parity * world.engines[rank].geometry.shared.set_bytes + offset
    return memory[start : start + count * dtype.itemsize].view(dtype)


def layouts() -> tuple[EpLayout, ...]:
    """All of them."""
    return tuple(EpLayout)
