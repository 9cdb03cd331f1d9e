"""One step over shared memory: store, commit, gather; store, commit, sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ...errors import MoEEpPeerError
from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...substrate.control import Header, Operation
from ...substrate.gather import sum_bags, weighted_sum_bags
from ...substrate.routes import ExpertBlocks, Ints, arrivals, homecoming
from ...substrate.rowtypes import code_name, row_code

if TYPE_CHECKING:
    from .fleet import ShmFleet  # noqa: F401 - named in a string below


@dataclass
class ShmStep(OpenStep):
    """``bounds`` ``[W+1]``: where each source's rows begin; ``blocks``: how they are sorted, in EXPERT_MAJOR."""

    bounds: Ints | None = None
    blocks: ExpertBlocks | None = None


class ShmHandle(HalvesHandle["ShmFleet", ShmStep]):
    """See :class:`moefleet.fleet.Handle` for the contract."""

    def combine_buffer(self) -> torch.Tensor | None:
        self._expect(Phase.RECEIVED, "combine_buffer")
        open_ = self._opened()
        if open_.blocks is not None:
            return None  # EXPERT_MAJOR: combine sums the rows where they lie
        return self._fleet.combined(open_.dtype, open_.step).view_as(open_.output.expert_tensors)

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        self._ids: npt.NDArray[np.int32] = topk_ids.numpy().astype(np.int32)
        self._weights: npt.NDArray[np.float32] = topk_weights.numpy().copy()

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> ShmStep:
        output = self._fleet.inbox(step).output(dtype, self._shape[1], scale_dtype)
        return ShmStep(step, dtype, scale_dtype, output)

    def _send_tokens(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        fleet, rank, step = self._fleet, self._fleet.bootstrap.rank, open_.step
        count, topk = self._ids.shape
        fleet.tokens(tokens.dtype, step)[:count] = tokens
        if scales is not None:
            fleet.scales(scales.dtype, step)[:count] = scales
        fleet.ids(rank, step, count, topk)[:] = self._ids
        fleet.weights(rank, step, count, topk)[:] = self._weights
        code = row_code(tokens.dtype, open_.scale_dtype)
        fleet.steps.commit(Operation.DISPATCH, step, tokens=count, topk=topk, dtype=code)

    def _receive_tokens(self, open_: ShmStep) -> None:
        fleet, step = self._fleet, open_.step
        headers = fleet.steps.collect(Operation.DISPATCH, step)
        self._check_same(headers, row_code(open_.dtype, open_.scale_dtype))
        got = arrivals(
            [fleet.ids(rank, step, h.tokens, h.topk) for rank, h in enumerate(headers)],
            [fleet.weights(rank, step, h.tokens, h.topk) for rank, h in enumerate(headers)],
            fleet.local_table,
            fleet.token_rows(step),
        )
        self._check_room(len(got.rows))
        scale_rows = None if open_.scale_dtype is None else fleet.scale_rows(got, step)
        open_.bounds = got.bounds
        open_.blocks = fleet.inbox(step).fill(got, fleet.table(open_.dtype), fleet.scale_table, scale_rows)
        fleet.rows_received += np.diff(got.bounds)

    def _send_rows(self, open_: ShmStep, rows: torch.Tensor) -> None:
        assert open_.bounds is not None
        fleet = self._fleet
        home = fleet.combined(rows.dtype, open_.step)
        starts = fleet.combine_starts(open_.bounds)
        if open_.blocks is not None:
            by = open_.blocks
            weighted_sum_bags(rows.reshape(-1, rows.shape[-1]), by.by_row, by.weight, by.bag, home[: len(by.bag) - 1])
        elif rows.data_ptr() != home.data_ptr():
            flat = rows.reshape(-1, rows.shape[-1])
            for at, count in zip(starts[:-1].tolist(), np.diff(open_.bounds).tolist(), strict=True):
                home[at : at + count] = flat[at : at + count]
        fleet.offsets(fleet.bootstrap.rank, open_.step)[:] = starts
        code = row_code(rows.dtype, None)
        fleet.steps.commit(Operation.COMBINE, open_.step, tokens=int(open_.bounds[-1]), topk=0, dtype=code)

    def _receive_rows(self, open_: ShmStep) -> torch.Tensor:
        fleet, step = self._fleet, open_.step
        rank, world = fleet.bootstrap.rank, fleet.bootstrap.world_size
        back = homecoming(self._ids, fleet.owner_table, world)
        headers = fleet.steps.collect(Operation.COMBINE, step)
        self._check_same(headers, row_code(open_.dtype, None))
        first = np.array([row + fleet.offsets(r, step)[rank] for r, row in enumerate(fleet.combined_rows(step))])
        return sum_bags(fleet.table(open_.dtype), first[back.rank] + back.position, back.bag)

    def _check_same(self, headers: Sequence[Header], code: int) -> None:
        """All ranks bring rows of one type, and the same K, to a step."""
        mine = headers[self._fleet.bootstrap.rank]
        for rank, header in enumerate(headers):
            for what, theirs, ours in (
                ("K", f"K = {header.topk}", f"K = {mine.topk}"),
                ("row type", code_name(header.dtype), code_name(code)),
            ):
                if theirs != ours:
                    raise MoEEpPeerError(
                        f"rank {rank} brought {theirs} to step {header.step}, this rank {ours}; a step has one {what}",
                        rank=rank,
                        reason=theirs,
                    )
