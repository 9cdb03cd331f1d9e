"""One rank's memory and its kernels, bound for a step to launch. Knows nothing of Fleets, handles or errors.

Runs on a GPU, or under Triton's interpreter on CPU tensors, where the ranks of a test share one process.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ...config import EpLayout
from ...substrate.control import SETS
from .geometry import CONTROL, SLOTS, Geometry
from .kernels.combine import combine
from .kernels.dispatch import dispatch
from .kernels.fail import depart, fail
from .kernels.update import update
from .launch import Launch, Launcher

_LAYOUT = {EpLayout.EXPERT_MAJOR: 0, EpLayout.RANK_MAJOR: 1, EpLayout.FLAT: 2}
_CODE = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
_GROUP = 4  # experts to a program of update
_ROWS = 32  # tokens to a snapshot program of update


@dataclass(frozen=True)
class Grids:
    """Programs of dispatch and combine, all of which fit on the GPU at once.

    Args:
        programs: the grid.
        senders: how many of them send; where fewer than all, the others receive. Where all, everybody does both.
        warps: of each program.
        max_registers: bound for the compiler, so that enough programs share a multiprocessor; 0 for none.
    """

    programs: int
    senders: int
    warps: int = 8
    max_registers: int = 0

    @classmethod
    def fitting(cls, programs: int, senders: int, warps: int, processors: int) -> Grids:
        """With the bound on registers by which this many programs are on ``processors`` at once."""
        together = -(-programs // processors)
        bound = REGISTERS // (together * warps * 32) // 8 * 8
        return cls(programs, senders, warps, bound if bound < MOST_REGISTERS else 0)


@dataclass(frozen=True)
class Output:
    """Memory that experts read, set ``number``: row bytes; ids and weights flat ``[rows * max_topk]``; counts."""

    number: int
    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor


class Engine:
    """See the module's text.

    Args:
        geometry: sizes and offsets.
        device: of all memory.
        shared: address of every rank's symmetric memory, zeroed.
        dispatch_grid, combine_grid: launch shapes; the number of dispatch's programs never changes.
        timeout_s: longest wait of a kernel.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        shared: Sequence[int],
        dispatch_grid: Grids,
        combine_grid: Grids,
        timeout_s: float,
    ) -> None:
        self.geometry, self.device = geometry, device
        self.dispatch_grid, self.combine_grid = dispatch_grid, combine_grid
        params, placement, world = geometry.params, geometry.placement, geometry.world_size
        self._launcher = Launcher()
        self._bound: dict[int, dict[Hashable, Launch]] = {}
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._peers = torch.tensor(list(shared), dtype=torch.int64, device=device)
        self.control = torch.zeros(CONTROL.words, dtype=torch.int64, device=device)
        self.control[CONTROL.budget_ns] = int(timeout_s * 1e9)
        self.alarm = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._alarm_view = self.alarm.numpy()  # seen through NumPy: torch takes longer to read one number
        firsts = [placement.first_slot(rank) for rank in range(world + 1)]
        self._firsts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self._table = placement.physical_table.to(device=device, dtype=torch.int32)
        self.mask = torch.ones(world, dtype=torch.int32, device=device)
        self._slots = [self.new_slot() for _ in range(SLOTS)]
        self._places = firsts[-1]
        self._layout = _LAYOUT[params.resolved_layout]
        self._expert_major = params.layout is EpLayout.EXPERT_MAJOR
        self._num_local = placement.num_local(geometry.rank)
        self.outputs = tuple(self._new_output(number) for number in range(SETS))
        self._block = min(8192, _power_of_two(params.token_hidden_size))

    def alarm_word(self) -> int:
        """What a kernel reported, 0 for nothing. Does not wait for the GPU."""
        return self._alarm_view.item()

    def clear_alarm(self) -> None:
        """Forget a reported error, so that the next one is seen."""
        self.alarm.zero_()
        self.control[CONTROL.error].zero_()

    def new_slot(self) -> torch.Tensor:
        """Memory of one handle's routing."""
        return torch.zeros(self.geometry.slot.words, dtype=torch.int32, device=self.device)

    def take_slot(self) -> torch.Tensor:
        """A slot that no handle uses."""
        return self._slots.pop() if self._slots else self.new_slot()

    def launches_of(self, slot: torch.Tensor) -> dict[Hashable, Launch]:
        """What its handles have bound for a slot; theirs to fill."""
        return self._bound.setdefault(slot.data_ptr(), {})

    def return_slot(self, slot: torch.Tensor) -> None:
        """Give a slot back, for the next handle."""
        self._slots.append(slot)

    def fail(self, slot: torch.Tensor, stream: int, *, fresh: bool, wait: bool = True) -> None:
        """Give up the step that ``slot`` dispatched, or (``fresh``) the next one."""
        g = self.geometry
        args = (slot, self._peers, self.control, self.alarm)
        constants = (g.shared, g.slot, g.rank, g.world_size, self.dispatch_grid.programs, self._early, fresh, wait)
        self._launcher.bind(fail, 1, args, constants, self._options(4))(stream)

    def depart(self, stream: int) -> None:
        """Tell the peers that this rank takes part in no further step."""
        g = self.geometry
        constants = (g.shared, g.rank, g.world_size, self.dispatch_grid.programs, self._early)
        self._launcher.bind(depart, 1, (self._peers, self.control), constants, self._options(4))(stream)

    def bind_update(self, slot: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Launch:
        """Read ids and weights ``[T, K]`` into ``slot``. Call with (stream, ids, weights)."""
        g, (count, topk) = self.geometry, ids.shape
        groups = -(-self._places // _GROUP) if self._expert_major else 0
        longest = 128 if self._expert_major else 1024
        chunk = min(longest, max(16, _power_of_two(count)))
        args = (ids, weights, slot, self._table, self._firsts, self.mask, self.control, count,
                *ids.stride(), *weights.stride())  # fmt: skip
        constants = (
            g.slot, g.world_size, g.params.num_experts, self._places, g.params.max_tokens_per_rank, topk,
            _power_of_two(topk), chunk, _GROUP, groups, _ROWS, g.placement.physical is not None, False, self._early,
        )  # fmt: skip
        grid = g.world_size + groups + -(-count // _ROWS)
        return self._launcher.bind(update, grid, args, constants, self._options(4 if chunk <= 128 else 8))

    def bind_dispatch(
        self, slot: torch.Tensor, x: torch.Tensor, topk: int, output: Output, send: bool = True, receive: bool = True
    ) -> Launch:
        """Send ``x`` ``[T, H]`` by ``slot``'s routing and fill ``output``, or one of the two. Call with (stream, x)."""
        g, p, grid = self.geometry, self.geometry.params, self.dispatch_grid
        args = (x, output.rows.view(x.dtype), output.ids, output.weights, output.counts, slot, self._peers,
                self._firsts, self.control, self.alarm, *x.stride())  # fmt: skip
        constants = (
            g.shared, g.slot, self._layout, g.rank, g.world_size, p.max_tokens_per_rank,
            p.token_hidden_size, topk, _power_of_two(topk), self._num_local, p.recv_capacity(g.world_size),
            _CODE[x.dtype], self._block, grid.programs, grid.senders, self._early, send, receive,
        )  # fmt: skip
        options = self._options(grid.warps, grid.max_registers)
        return self._launcher.bind(dispatch, grid.programs, args, constants, options)

    def bind_combine(
        self,
        slot: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        topk: int,
        send: bool = True,
        receive: bool = True,
    ) -> Launch:
        """Send contiguous ``rows`` home and sum into contiguous ``out`` ``[T, H]``, or one of the two. Call with
        (stream, rows, out)."""
        g, p, grid = self.geometry, self.geometry.params, self.combine_grid
        args = (rows, out, slot, self._peers, self.control, self.alarm, out.shape[0])
        constants = (
            g.shared, g.slot, self._layout, g.rank, g.world_size, p.max_tokens_per_rank,
            p.token_hidden_size, topk, p.recv_capacity(g.world_size), self._block, grid.programs, grid.senders,
            self._early, send, receive,
        )  # fmt: skip
        options = self._options(grid.warps, grid.max_registers)
        return self._launcher.bind(combine, grid.programs, args, constants, options)

    def _options(self, warps: int, max_registers: int = 0) -> dict[str, object]:
        """What Triton is told: ``launch_pdl`` lets a kernel's programs start while the last of the one before run."""
        bound = {"maxnreg": max_registers} if max_registers else {}
        return {"num_warps": warps, "launch_pdl": self._early, **bound}

    def _new_output(self, number: int) -> Output:
        g, p = self.geometry, self.geometry.params
        routed = 0 if self._expert_major else g.output_rows * p.max_topk
        row_bytes = g.output_rows * p.token_hidden_size * p.dtype_bytes
        counts = {0: self._num_local, 1: g.world_size, 2: 1}[self._layout]
        return Output(
            number,
            torch.empty(row_bytes, dtype=torch.uint8, device=self.device),
            torch.full((routed,), -1, dtype=torch.int64, device=self.device),
            torch.zeros(routed, dtype=torch.float32, device=self.device),
            torch.zeros(counts, dtype=torch.int32, device=self.device),
        )


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
