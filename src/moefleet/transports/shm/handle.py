"""One step over shared memory: bring tokens, commit, find what came; give rows, commit, sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import numpy as np
import torch

from ...errors import MoEEpPeerError
from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...knobs import HandleAlgoKnob, HandleAlgoKnobTopKWeights
from ...substrate.control import SETS, Operation, as_flags
from ...substrate.inbox import Inbox
from ...substrate.rowtypes import row_code
from ...tensors import CombineInputParams, CombineOutput, DispatchInputParams, DispatchOutput, HandleParams, is_plain
from . import low_precision
from .buffers import BufferSet
from .compiled import NativeInbox
from .moves import Ranks, Routing
from .whole import Known, Part, Reached, pack

if TYPE_CHECKING:
    from .fleet import ShmFleet

_IDS, _WEIGHTS = (torch.int32, torch.int64), (torch.float32,)
_SEQUENCES = (list, tuple)
_IDLE, _RECEIVED, _DONE = Phase.IDLE, Phase.RECEIVED, int(Reached.DONE)


class Parcel(NamedTuple):
    """Tokens ``[T, H]`` and scales that a rank brings, the code of their types, and whether it places them."""

    tokens: torch.Tensor
    scales: torch.Tensor | None
    dtype: int
    placed: bool


@dataclass(kw_only=True)
class ShmStep(OpenStep):
    """``at``, ``inbox``: the memory that it uses; ``placing``: whether peers reach the inbox; ``arrived``: rows;
    ``present``: the ranks that took part in dispatch, as bits; ``part``: what the helper was told,
    where it did all of dispatch in one call."""

    at: BufferSet
    inbox: Inbox
    placing: bool
    arrived: int = 0
    present: int = 0
    part: Part | None = None


def _nothing() -> None:
    """What is known at first."""


class ShmHandle(HalvesHandle["ShmFleet", ShmStep]):
    """See :class:`moefleet.fleet.Handle` for the contract.

    Each call of a whole phase has a short way, for a healthy step and plain tensors of a kind that was checked before.
    It touches as little of Python's code and memory as it can, since rows push both out of the caches between two
    calls. Where anything is unusual the long way does the same, and says what is wrong.
    """

    def __init__(self, fleet: ShmFleet, params: HandleParams, knobs: Sequence[HandleAlgoKnob]) -> None:
        self._routing: Routing | None = None
        self._known: Callable[[], Known | None] = _nothing
        self._again = (
            False  # whether this handle, or one of its shape, has gone through a step before: what it finds is kept
        )
        super().__init__(fleet, params, knobs)

    def update(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> None:
        if (
            self._phase is not _IDLE
            or not self._fleet.calm()
            or not self._read_plain(params.topk_ids, algo_knobs, self._shape)
        ):
            super().update(params, algo_knobs)

    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        fleet, x, known = self._fleet, params.x, self._known()
        steps, whole = fleet.steps, fleet.whole
        open_: ShmStep | None = None if known is None else known[(steps.last + 1) % SETS]
        if (
            open_ is None
            or whole is None
            or (part := open_.part) is None
            or part.fleet != whole.fleet  # of another topology
            or open_.output is not part.inbox.shown  # it was made anew for another handle
            or self._phase is not _IDLE
            or type(x) not in _SEQUENCES
            or len(x) != 1
            or not is_plain(tokens := x[0], part.sent, part.sent_types, None)
            or not fleet.calm()
            or not (step := steps.begin_now())
        ):
            return super().dispatch(params)
        open_.step, open_.dtype, open_.result, self._open = step, part.sent_types[0], None, open_
        try:
            fleet.tokens_sent += self._shape[0]
            reached = whole.dispatch_call(
                pack(
                    whole.fleet, part.address, step, fleet.faults.epoch, tokens.data_ptr(), 0, whole.everybody,
                    whole.everybody,
                )
            )  # fmt: skip
            open_.arrived, open_.present = reached - _DONE, fleet.faults.everybody
            if reached < _DONE or fleet.faults.tolerant:
                self._go_on(open_, part, Parcel(tokens, None, part.struct.dtype, part.struct.placed > 0), reached)
        except BaseException as error:
            self.give_up(error)
            raise
        self._phase = _RECEIVED
        return open_.output

    def combine(self, params: CombineInputParams) -> CombineOutput:
        fleet, x, out, open_ = self._fleet, params.x, params.out, self._open
        if (
            open_ is None
            or (part := open_.part) is None
            or (home := part.home) is None
            or (whole := fleet.whole) is None
            or self._phase is not _RECEIVED
            or type(x) not in _SEQUENCES
            or len(x) != 1
            or not is_plain(rows := x[0], part.made, part.made_types, None)
            or (out is not None and not is_plain(out, home, part.made_types, None))
            or open_.present != fleet.faults.everybody
            or not fleet.calm()
        ):
            return super().combine(params)
        try:
            open_.dtype, open_.result = rows.dtype, out
            if out is None:
                out = part.make()
            output = CombineOutput(out)  # before the call: after it, rows have pushed out what that takes
            reached = whole.combine_call(
                pack(
                    whole.fleet, part.address, open_.step, fleet.faults.epoch, rows.data_ptr(), out.data_ptr(),
                    whole.everybody, whole.everybody,
                )
            )  # fmt: skip
            if reached != _DONE or fleet.faults.tolerant:
                return self._close(open_, self._came_home(open_, out, reached, open_.present))
        except BaseException as error:
            self.give_up(error)
            raise
        self._open, self._phase, open_.result = None, _IDLE, None
        fleet.steps.open.discard(open_.step)
        return output

    def _read(self, params: HandleParams, knobs: Sequence[HandleAlgoKnob]) -> None:
        ids, limits = params.topk_ids, self._fleet.params
        fits = (
            type(ids) is torch.Tensor
            and ids.dim() == 2
            and ids.shape[0] <= limits.max_tokens_per_rank
            and 1 <= ids.shape[1] <= limits.max_topk
        )
        if fits and self._routing is None:
            self._inherit(ids.shape)
        if not fits or not self._read_plain(ids, knobs, ids.shape):
            before = self._split, self._expected_rows
            super()._read(params, knobs)
            if before != (self._split, self._expected_rows):
                self._known = _nothing

    def _read_plain(self, ids: torch.Tensor, knobs: Sequence[HandleAlgoKnob], shape: torch.Size) -> bool:
        """Read the usual, plain ids and weights of this shape and no other knob, in one call of the helper."""
        fleet, weights = self._fleet, self._given_weights
        if len(knobs) == 1 and type(knobs[0]) is HandleAlgoKnobTopKWeights:
            weights = knobs[0].weights
        elif knobs:
            return False
        if (
            weights is None
            or not is_plain(ids, shape, _IDS, None)
            or not is_plain(weights, shape, _WEIGHTS, None)
            or not fleet.moves.read(self._routing or self._routing_of(ids), ids, weights)
        ):
            return False
        self._given_weights, self._shape = weights, shape
        return True

    def _inherit(self, shape: torch.Size) -> None:
        """Take what an earlier handle of this shape has left."""
        if (whole := self._fleet.whole) is not None:
            self._again = shape in whole.left
            if (known := whole.inherit(self, shape)) is not None:
                self._known, self._routing = ref(known), known.routing

    def destroy(self) -> None:
        whole = self._fleet.whole
        if whole is not None and self._phase is _IDLE and not self._split and self._expected_rows is None:
            whole.leave(self, self._shape)
            self._known, self._routing = _nothing, None
        super().destroy()

    def combine_buffer(self) -> torch.Tensor | None:
        if self._phase is not _RECEIVED or not self._fleet.calm():
            self._expect(Phase.RECEIVED, "combine_buffer")
        fleet, open_ = self._fleet, self._opened()
        room = open_.at.returned
        if fleet.buffers.made:
            room = fleet.buffers.made[fleet.moves.making(open_.step)]
        if room is None:
            return None  # EXPERT_MAJOR, nothing is placed: combine sums the rows where they lie
        fleet.steps.write_combined(open_.step)
        return room[open_.dtype]

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        self._routing_of(topk_ids).read(topk_ids, topk_weights)

    def _routing_of(self, topk_ids: torch.Tensor) -> Routing:
        """Memory for routing of this shape, which stays the same for the handle's life."""
        if self._routing is None:
            self._routing = Routing(topk_ids.shape)
        return self._routing

    def _routed(self) -> Routing:
        assert self._routing is not None, "read at construction"
        return self._routing

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> ShmStep:
        buffers, placing = self._fleet.buffers, self._fleet.placing
        inbox = buffers.landings[step % SETS] if placing else buffers.inbox(step, self._fleet.steps.open)
        if self._fleet.row_format.quantised:
            scale_dtype = torch.float32
            output = low_precision.shown(inbox.output(dtype, self._shape[1], scale_dtype))
        else:
            output = inbox.output(dtype, self._shape[1], scale_dtype)
        return ShmStep(step, dtype, scale_dtype, output, at=buffers.sets[step % SETS], inbox=inbox, placing=placing)

    def _exchange_tokens(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        parcel, whole = self._pack(open_, tokens, scales, wait=True), self._fleet.whole
        if whole is None:
            self._send(open_, parcel)
            return self._receive_tokens(open_)
        assert isinstance(open_.inbox, NativeInbox)
        part, reached = whole.dispatch(open_.step, open_.inbox, self._routed(), *parcel, self._expected_rows)
        open_.part = part
        self._go_on(open_, part, parcel, reached)
        if self._again and reached >= Reached.DONE and self._fleet.calm() and part.keep_sent(tokens):
            known = self._known()
            if known is None:
                known = whole.known[self] = Known(self._routed())
                self._known = ref(known)
            known[open_.step % SETS] = open_

    def _go_on(self, open_: ShmStep, part: Part, parcel: Parcel, reached: int) -> None:
        """What is left of dispatch, where the helper came so far."""
        if reached == Reached.ROUTES:
            self._place(open_, parcel, looked=True)
        if reached <= Reached.COMMITTED:
            return self._receive_tokens(open_, looked=reached == Reached.COMMITTED)
        open_.arrived, open_.present = part.inbox.struct.total, self._fleet.faults.trusted
        self._check_room(open_.arrived)
        self._fleet.steps.overtaken(Operation.DISPATCH, open_.step)

    def _send_tokens(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        self._send(open_, self._pack(open_, tokens, scales, wait=False))

    def _pack(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None, *, wait: bool) -> Parcel:
        """What this rank brings; ``wait``: whether it may wait for the peers' routing first."""
        fleet = self._fleet
        fleet.tokens_sent += self._shape[0]
        if fleet.row_format.quantised:
            tokens, scales = low_precision.packed(tokens)
        placed = open_.placing and (fleet.places_alone or (wait and tokens.nbytes >= fleet.place_bytes))
        return Parcel(tokens, scales, row_code(tokens.dtype, open_.scale_dtype), placed)

    def _send(self, open_: ShmStep, parcel: Parcel) -> None:
        fleet = self._fleet
        fleet.moves.store(open_.at, None if parcel.placed else parcel.tokens, parcel.scales, self._routed())
        if not parcel.placed:
            return self._commit_tokens(Operation.DISPATCH, open_, parcel)
        if not fleet.places_alone:
            self._commit_tokens(Operation.ROUTES, open_, parcel)
        self._place(open_, parcel)

    def _place(self, open_: ShmStep, parcel: Parcel, *, looked: bool = False) -> None:
        """Place the rows: at once in RANK_MAJOR; elsewhere where they go follows from what lower ranks bring."""
        fleet, before = self._fleet, (1 << self._fleet.bootstrap.rank) - 1
        tokens: Ranks = ()
        if not fleet.places_alone:
            tokens, _, _ = fleet.steps.collect(Operation.ROUTES, open_.step, before, looked=looked)
        fleet.moves.push(open_.at, parcel.tokens, self._routed(), tokens, fleet.faults.trusted)
        self._commit_tokens(Operation.DISPATCH, open_, parcel)

    def _commit_tokens(self, operation: Operation, open_: ShmStep, parcel: Parcel) -> None:
        count, topk = self._shape
        self._fleet.steps.commit(
            operation, open_.step, tokens=count, topk=topk, dtype=parcel.dtype, placed=parcel.placed
        )

    def _receive_tokens(self, open_: ShmStep, *, looked: bool = False) -> None:
        fleet = self._fleet
        tokens, placed, open_.present = fleet.steps.collect(Operation.DISPATCH, open_.step, looked=looked)
        if not open_.placing and any(placed):  # by ranks with another mask, in memory that this one does not look at
            tokens = [0 if there else count for count, there in zip(tokens, placed, strict=True)]
            open_.present &= ~sum(1 << rank for rank, there in enumerate(placed) if there)
            placed, fleet.faults.behind = [0] * len(placed), True
        open_.arrived = fleet.moves.arrive(open_.at, open_.inbox, tokens, placed, open_.present, self._shape[1])
        self._check_room(open_.arrived)
        fleet.moves.gather(open_.at, open_.inbox, open_.dtype, open_.step)
        fleet.steps.overtaken(Operation.DISPATCH, open_.step)

    def _exchange_rows(self, open_: ShmStep, rows: torch.Tensor) -> torch.Tensor:
        fleet = self._fleet
        if fleet.whole is None or open_.part is None:
            self._send_rows(open_, rows)
            return self._receive_rows(open_)
        taking = open_.present & fleet.faults.trusted
        out, reached = fleet.whole.combine(open_.step, open_.part, rows, taking, open_.result)
        if self._again:
            open_.part.keep_made(rows, fleet.whole.results)
        self._again = True
        return self._came_home(open_, out, reached, taking)

    def _came_home(self, open_: ShmStep, out: torch.Tensor, reached: int, taking: int) -> torch.Tensor:
        """What is left of combine, where the helper came so far."""
        if reached < Reached.DONE:
            return self._receive_rows(open_, looked=True)
        unserved = reached - Reached.DONE
        return self._received_rows(open_, out, unserved - 1 if unserved else None, taking)

    def _send_rows(self, open_: ShmStep, rows: torch.Tensor) -> None:
        fleet = self._fleet
        fleet.steps.write_combined(open_.step)
        stay = fleet.moves.give(open_.at, open_.inbox, rows)
        code = row_code(rows.dtype, None)
        fleet.steps.commit(Operation.COMBINE, open_.step, tokens=open_.arrived, topk=0, dtype=code, placed=stay)

    def _receive_rows(self, open_: ShmStep, *, looked: bool = False) -> torch.Tensor:
        fleet = self._fleet
        _, stayed, present = fleet.steps.collect(Operation.COMBINE, open_.step, open_.present, looked=looked)
        summed, unserved = fleet.moves.sum(open_.at, self._routed(), present, stayed, open_.dtype, open_.result)
        return self._received_rows(open_, summed, unserved, present)

    def _received_rows(self, open_: ShmStep, summed: torch.Tensor, unserved: int | None, present: int) -> torch.Tensor:
        fleet = self._fleet
        if unserved is not None:
            self._unserved(unserved, open_.step)
        fleet.steps.overtaken(Operation.COMBINE, open_.step)
        return self._rescaled(summed, present) if fleet.renormalize else summed

    def _unserved(self, peer: int, step: int) -> None:
        """A peer served other tokens than this rank's: with fault tolerance it may have taken it for missing."""
        if not self._fleet.faults.tolerant:
            reason = "it served other tokens than this rank brought"
            raise MoEEpPeerError(f"rank {peer} in combine of step {step}: {reason}", rank=peer, reason=reason)
        self._fleet.faults.behind = True

    def _rescaled(self, summed: torch.Tensor, present: int) -> torch.Tensor:
        """Rows that lost some of their experts, times (sum of all weights) / (sum of the live ones)."""
        fleet, routing = self._fleet, self._routed()
        live = np.append(as_flags(present, fleet.bootstrap.world_size), False)
        owner = fleet.owner_table.take(routing.ids, mode="wrap")
        total = routing.weights.sum(axis=1, where=owner >= 0)
        left = routing.weights.sum(axis=1, where=live[owner])
        lost = ((owner >= 0) & ~live[owner]).any(axis=1)
        factor = torch.from_numpy(np.divide(total, left, out=np.zeros_like(total), where=left != 0))[lost]
        summed[lost] = (summed[lost].float() * factor[:, None]).to(summed.dtype)
        return summed
