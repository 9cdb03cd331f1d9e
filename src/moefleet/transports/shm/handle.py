"""One step over shared memory: store, commit, gather; store, commit, sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...knobs import HandleAlgoKnob, HandleAlgoKnobTopKWeights
from ...substrate.control import SETS, Operation
from ...substrate.inbox import Inbox
from ...substrate.rowtypes import row_code
from ...tensors import HandleParams, is_plain
from . import low_precision
from .buffers import BufferSet
from .moves import Routing

if TYPE_CHECKING:
    from .fleet import ShmFleet  # noqa: F401 - named in a string below

_IDS, _WEIGHTS = (torch.int32, torch.int64), (torch.float32,)


@dataclass(kw_only=True)
class ShmStep(OpenStep):
    """``at``, ``inbox``: the memory that it uses; ``arrived``: rows; ``present``: the ranks that took part in dispatch,
    as bits."""

    at: BufferSet
    inbox: Inbox
    arrived: int = 0
    present: int = 0


class ShmHandle(HalvesHandle["ShmFleet", ShmStep]):
    """See :class:`moefleet.fleet.Handle` for the contract."""

    _routing: Routing | None = None

    def update(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> None:
        weights = None if algo_knobs else self._given_weights
        if len(algo_knobs) == 1 and type(algo_knobs[0]) is HandleAlgoKnobTopKWeights:
            weights = algo_knobs[0].weights
        self._expect(Phase.IDLE, "update")
        fleet, routing, ids = self._fleet, self._routed(), params.topk_ids
        if (
            weights is not None
            and is_plain(ids, self._shape, _IDS, fleet.device)
            and is_plain(weights, self._shape, _WEIGHTS, fleet.device)
            and fleet.moves.read(routing, ids, weights)
        ):
            self._given_weights = weights
        else:
            super().update(params, algo_knobs)

    def combine_buffer(self) -> torch.Tensor | None:
        self._expect(Phase.RECEIVED, "combine_buffer")
        open_ = self._opened()
        if open_.at.returned is None:
            return None  # EXPERT_MAJOR: combine sums the rows where they lie
        self._fleet.steps.write_combined(open_.step)
        return open_.at.returned[open_.dtype]

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        if self._routing is None:
            self._routing = Routing(topk_ids, topk_weights)
        else:
            self._routing.read(topk_ids, topk_weights)

    def _routed(self) -> Routing:
        assert self._routing is not None, "read at construction"
        return self._routing

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> ShmStep:
        buffers = self._fleet.buffers
        inbox = buffers.inbox(step, self._fleet.steps.open)
        if self._fleet.row_format.quantised:
            scale_dtype = torch.float32
            output = low_precision.shown(inbox.output(dtype, self._shape[1], scale_dtype))
        else:
            output = inbox.output(dtype, self._shape[1], scale_dtype)
        return ShmStep(step, dtype, scale_dtype, output, at=buffers.sets[step % SETS], inbox=inbox)

    def _send_tokens(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        fleet, (count, topk) = self._fleet, self._shape
        if fleet.row_format.quantised:
            tokens, scales = low_precision.packed(tokens)
        fleet.moves.store(open_.at, tokens, scales, self._routed())
        code = row_code(tokens.dtype, open_.scale_dtype)
        fleet.steps.commit(Operation.DISPATCH, open_.step, tokens=count, topk=topk, dtype=code)
        fleet.tokens_sent += count

    def _receive_tokens(self, open_: ShmStep) -> None:
        fleet = self._fleet
        tokens, open_.present = fleet.steps.collect(Operation.DISPATCH, open_.step)
        open_.arrived = fleet.moves.arrive(open_.at, open_.inbox, tokens, open_.present, self._shape[1])
        self._check_room(open_.arrived)
        fleet.moves.gather(open_.at, open_.inbox, open_.dtype)
        fleet.steps.overtaken(Operation.DISPATCH, open_.step)

    def _send_rows(self, open_: ShmStep, rows: torch.Tensor) -> None:
        fleet = self._fleet
        fleet.steps.write_combined(open_.step)
        fleet.moves.give(open_.at, open_.inbox, rows)
        code = row_code(rows.dtype, None)
        fleet.steps.commit(Operation.COMBINE, open_.step, tokens=open_.arrived, topk=0, dtype=code)

    def _receive_rows(self, open_: ShmStep) -> torch.Tensor:
        fleet = self._fleet
        _, present = fleet.steps.collect(Operation.COMBINE, open_.step, open_.present)
        checked = fleet.faults.tolerant
        summed, unserved = fleet.moves.sum(open_.at, self._routed(), present, open_.dtype, open_.result, checked)
        if unserved:
            fleet.faults.behind = True
        fleet.steps.overtaken(Operation.COMBINE, open_.step)
        return self._rescaled(summed, present) if fleet.renormalize else summed

    def _rescaled(self, summed: torch.Tensor, present: int) -> torch.Tensor:
        """Rows that lost some of their experts, times (sum of all weights) / (sum of the live ones)."""
        fleet, routing = self._fleet, self._routed()
        live = np.append((present >> np.arange(fleet.bootstrap.world_size)) & 1 > 0, False)
        owner = fleet.owner_table.take(routing.ids, mode="wrap")
        total = routing.weights.sum(axis=1, where=owner >= 0)
        left = routing.weights.sum(axis=1, where=live[owner])
        lost = ((owner >= 0) & ~live[owner]).any(axis=1)
        factor = torch.from_numpy(np.divide(total, left, out=np.zeros_like(total), where=left != 0))[lost]
        summed[lost] = (summed[lost].float() * factor[:, None]).to(summed.dtype)
        return summed
