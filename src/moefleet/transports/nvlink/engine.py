"""One rank's memory and its kernels, bound for a step to launch. Knows nothing of Fleets, handles or errors.

Runs on a GPU, or under Triton's interpreter on CPU tensors, where the ranks of a test share one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...config import EpLayout
from ...quant import BLOCK
from ...substrate.control import SETS
from ...substrate.rowtypes import row_code
from .geometry import BOARD, CONTROL, FOREVER, MOST_JUDGED, NOTE_WORDS, ROUND_SHIFT, SLOTS, Geometry
from .kernels.combine import combine
from .kernels.dispatch import dispatch
from .kernels.expect import expect
from .kernels.fail import depart, fail
from .kernels.judging import announce
from .kernels.rows import Rows
from .kernels.update import update
from .launch import Launch, Launcher

_LAYOUT = {EpLayout.EXPERT_MAJOR: 0, EpLayout.RANK_MAJOR: 1, EpLayout.FLAT: 2}
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 4096  # columns that are encoded at once
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
    """Memory that experts read, set ``number``: bytes of rows and scales; ids and weights flat ``[rows * max_topk]``;
    counts."""

    number: int
    rows: torch.Tensor
    scales: torch.Tensor
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
        timeout_s: longest wait of a kernel, peers that compile or wait themselves aside.
        count: whether kernels count what stats report.
        tolerant: whether a rank that does not come in time is left out from then on, and accused.
        renormalize: whether tokens that lost experts are scaled up.

    Attributes:
        alarm_word: what a kernel reported, 0 for nothing. Does not wait for the GPU.
        board: what host and kernels tell each other about peers, see :class:`Board`.
        mask: int32 ``[W]``, 1 for a rank that steps count.
    """

    alarm_word: Callable[[], int]

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        shared: Sequence[int],
        dispatch_grid: Grids,
        combine_grid: Grids,
        timeout_s: float,
        count: bool = True,
        *,
        tolerant: bool = False,
        renormalize: bool = False,
    ) -> None:
        self.geometry, self.device = geometry, device
        self.dispatch_grid, self.combine_grid = dispatch_grid, combine_grid
        params, placement, world = geometry.params, geometry.placement, geometry.world_size
        self._launcher = Launcher()
        self._bound: dict[int, dict[Hashable, Launch]] = {}
        self.counts = geometry.counts if count else None
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._native = self._early and torch.version.hip is None  # has an instruction that converts to e4m3
        self._peers = torch.tensor(list(shared), dtype=torch.int64, device=device)
        self.control = torch.zeros(geometry.counts.end, dtype=torch.int64, device=device)
        self._budget_ns = int(timeout_s * 1e9)
        self.alarm = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.alarm_word = self.alarm.numpy().item  # through NumPy: torch takes longer to read one number
        self._no_note = torch.zeros(NOTE_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._tolerant, self._renormalize = tolerant, renormalize
        self._board = torch.zeros(BOARD.words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.board = self._board.numpy()
        self.control[CONTROL.board] = self._board.data_ptr()
        firsts = [placement.first_slot(rank) for rank in range(world + 1)]
        self._firsts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self._table = placement.physical_table.to(device=device, dtype=torch.int32)
        self.mask = torch.ones(world, dtype=torch.int32, device=device)
        self._slots = [self.new_slot() for _ in range(SLOTS)]
        self._kept: list[torch.Tensor] = []
        self._places = firsts[-1]
        self._layout = _LAYOUT[params.resolved_layout]
        self._expert_major = params.layout is EpLayout.EXPERT_MAJOR
        self._num_local = placement.num_local(geometry.rank)
        self.outputs = tuple(self._new_output(number) for number in range(SETS))
        self._block = min(8192, _power_of_two(params.token_hidden_size))
        self.clear_alarm()
        self.count_only(self.mask.tolist())
        self._prepare()

    def _prepare(self) -> None:
        """Compile now what tells the peers that this rank compiles, and what faults need."""
        g, on_gpu = self.geometry, self.device.type == "cuda"
        self._side_stream = torch.cuda.Stream(self.device).cuda_stream if on_gpu else 0  # torch never destroys one
        constants = (g.shared, g.rank, g.world_size)
        self._announce = self._launcher.bind(announce, 1, (self._peers, self.control), constants, {"num_warps": 1})
        if self._tolerant:
            for fresh in (True, False):
                self._bind_fail(self._slots[0], fresh, True)
        self._launcher.around_compiling = self._compiling

    def clear_alarm(self) -> None:
        """Forget a reported error, so that the next one is seen, and where a wait has failed, send and wait again: on
        the current stream, where what was launched so far comes first."""
        self.alarm.zero_()
        self.control[CONTROL.budget_ns] = self._budget_ns
        self.control[CONTROL.sound] = FOREVER
        self.control[CONTROL.error] = 0

    def new_slot(self) -> torch.Tensor:
        """Memory of one handle's routing."""
        return torch.zeros(self.geometry.slot.words, dtype=torch.int32, device=self.device)

    def take_slot(self) -> torch.Tensor:
        """A slot that no handle uses."""
        return self._slots.pop() if self._slots else self.new_slot()

    def launches_of(self, slot: torch.Tensor) -> dict[Hashable, Launch]:
        """What its handles have bound for a slot; theirs to fill."""
        return self._bound.setdefault(slot.data_ptr(), {})

    def return_slot(self, slot: torch.Tensor, *, captured: bool = False) -> None:
        """Give a slot back, for the next handle, or for as long as this engine lives to graphs that captured it."""
        (self._kept if captured else self._slots).append(slot)

    def fail(
        self, slot: torch.Tensor, stream: int, note: torch.Tensor | None = None, *, fresh: bool, wait: bool = True
    ) -> None:
        """Give up the step that ``slot`` dispatched, or (``fresh``) the next one. ``note`` tells the peers why: pinned,
        int64 ``[NOTE_WORDS]``, unchanged until this has run. ``wait``: whether for the peers, where the step that comes
        next needs that, or they may not have read the last note."""
        self._bind_fail(slot, fresh, wait)(stream, self._no_note if note is None else note)

    def _bind_fail(self, slot: torch.Tensor, fresh: bool, wait: bool) -> Launch:
        g = self.geometry
        args = (self._no_note, slot, self._peers, self.control, self.alarm)
        constants = (g.shared, g.slot, g.rank, g.world_size, self.dispatch_grid.programs, self._early, fresh, wait,
                     self._tolerant)  # fmt: skip
        return self._launcher.bind(fail, 1, args, constants, self._options(4))

    def expect(self, slot: torch.Tensor, rows: int, stream: int) -> None:
        """Report it if the step that ``slot`` received brought other than ``rows`` tokens in all."""
        g = self.geometry
        args, constants = (slot, self.control, self.alarm, rows), (g.slot, g.rank, g.world_size, self._early)
        self._launcher.bind(expect, 1, args, constants, self._options(4))(stream)

    def depart(self, stream: int) -> None:
        """Tell the peers that this rank takes part in no further step."""
        g = self.geometry
        constants = (g.shared, g.rank, g.world_size, self.dispatch_grid.programs, self._early, self._tolerant)
        self._launcher.bind(depart, 1, (self._peers, self.control), constants, self._options(4))(stream)

    def announce(self, number: int) -> None:
        """Tell the peers that this rank is in round ``number``: they stop waiting for it in steps of earlier ones. At
        once, beside whatever runs; from any thread whose device this is."""
        self.board[BOARD.round] = number
        self._announce(self._side_stream)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Tell the peers that this rank compiles meanwhile."""
        self.board[BOARD.compiling] += 1
        self._announce(self._side_stream)
        try:
            yield
        finally:
            self.board[BOARD.compiling] -= 1
            self._announce(self._side_stream)

    @property
    def last_step(self) -> int:
        """The last step begun. Waits for the current stream."""
        return int(self.control[CONTROL.launches]) // self.dispatch_grid.programs

    def count_only(self, mask: Sequence[int]) -> None:
        """From the next step on neither wait for nor send to ranks that ``mask`` ``[W]`` has 0 for; forget accusations.
        While no kernel runs."""
        self.mask.copy_(torch.tensor(mask, dtype=torch.int32))
        left = torch.zeros(MOST_JUDGED, dtype=torch.int64)
        left[: len(mask)] = torch.tensor([FOREVER if bit else 0 for bit in mask][:MOST_JUDGED])
        self.control[CONTROL.left : CONTROL.left + MOST_JUDGED] = left
        self.board[BOARD.accused :] = 0

    def resume(self, step: int, number: int) -> None:
        """Let ``step``, in round ``number``, be the next one. While no kernel runs."""
        self.clear_alarm()
        self.control[CONTROL.launches] = (step - 1) * self.dispatch_grid.programs
        self.control[CONTROL.base] = number << ROUND_SHIFT
        self.control[CONTROL.came_back : CONTROL.came_back + SETS] = 0  # nobody is reading

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
        self,
        slot: torch.Tensor,
        x: torch.Tensor,
        topk: int,
        output: Output,
        send: bool = True,
        receive: bool = True,
        scales: torch.Tensor | None = None,
        staged: bool = False,
    ) -> Launch:
        """Send ``x`` ``[T, H]``, with ``scales`` ``[T, S]`` if given, by ``slot``'s routing and fill ``output``, or one
        of the two. Call with (stream, x) or (stream, x, scales). ``staged``: ``x`` may change between the two."""
        g, p, grid, form = self.geometry, self.geometry.params, self.dispatch_grid, self.geometry.rows
        code = row_code(x.dtype, torch.float32 if form.quantised else None if scales is None else scales.dtype)
        x, per_row, strides = _as_units(x), 0, [0, 0]
        given = arrived = slot  # neither is read nor written where there are no scales
        if form.quantised:
            arrived, per_row = output.scales.view(torch.float32), form.scale_bytes // 4
        elif scales is not None:
            given, per_row, strides = _as_units(scales), scales.shape[1], list(scales.stride())
            arrived = output.scales.view(given.dtype)
        rows = output.rows if form.there_bytes == 1 else output.rows.view(x.dtype)
        args = (x, given, rows, arrived, output.ids, output.weights, output.counts, slot, self._peers,
                self._firsts, self.control, self.alarm, *x.stride(), *strides)  # fmt: skip
        piece = min(_PIECE, max(BLOCK, self._block))
        constants = (
            g.shared, g.slot, self._layout, g.rank, g.world_size, p.max_tokens_per_rank,
            p.token_hidden_size, topk, _power_of_two(topk), self._num_local, p.recv_capacity(g.world_size),
            code, self._block, grid.programs, grid.senders, self._early, send, receive, staged, self.counts,
            Rows(form.quantised, self._native, piece, per_row, min(1024, _power_of_two(per_row))), self._tolerant,
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
        staged: bool = False,
    ) -> Launch:
        """Send contiguous ``rows`` home and sum into contiguous ``out`` ``[T, H]``, or one of the two. Call with
        (stream, rows, out). ``staged``: ``rows`` may change between the two."""
        g, p, grid = self.geometry, self.geometry.params, self.combine_grid
        args = (rows, out, slot, self._peers, self._firsts, self.control, self.alarm, out.shape[0])
        constants = (
            g.shared, g.slot, self._layout, g.rank, g.world_size, p.max_tokens_per_rank,
            p.token_hidden_size, topk, p.recv_capacity(g.world_size), self._block, grid.programs, grid.senders,
            self._early, send, receive, staged, self.counts, self._tolerant, self._renormalize,
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
        row_bytes = g.output_rows * g.rows.hidden * g.rows.there_bytes
        counts = {0: self._num_local, 1: g.world_size, 2: 1}[self._layout]
        return Output(
            number,
            torch.empty(row_bytes, dtype=torch.uint8, device=self.device),
            torch.empty(g.output_rows * g.rows.scale_bytes, dtype=torch.uint8, device=self.device),
            torch.full((routed,), -1, dtype=torch.int64, device=self.device),
            torch.zeros(routed, dtype=torch.float32, device=self.device),
            torch.zeros(counts, dtype=torch.int32, device=self.device),
        )


def _as_units(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of one byte, and scales, as kernels take them: as integers, since they only move them."""
    movable = tensor.is_floating_point() and tensor.itemsize > 1
    return tensor if movable else tensor.view(_UNITS[tensor.itemsize])


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
