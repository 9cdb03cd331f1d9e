"""One step over shared memory: store, commit, gather; store, commit, sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ...config import EpLayout
from ...errors import MoEEpPeerError
from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...substrate.control import SETS, Header, Operation
from ...substrate.gather import sum_bags, weighted_sum_bags
from ...substrate.inbox import Inbox
from ...substrate.routes import ExpertBlocks, Homecoming, Ints, arrivals, homecoming
from ...substrate.rowtypes import code_name, row_code
from .buffers import BufferSet

if TYPE_CHECKING:
    from .fleet import ShmFleet  # noqa: F401 - named in a string below


@dataclass(kw_only=True)
class ShmStep(OpenStep):
    """``inbox``: what receives the rows; ``bounds`` ``[W+1]``: where each source's rows begin; ``blocks``: how they are
    sorted, in EXPERT_MAJOR; ``present``: the ranks that took part in dispatch, as bits."""

    inbox: Inbox
    bounds: Ints | None = None
    blocks: ExpertBlocks | None = None
    present: int = 0


class ShmHandle(HalvesHandle["ShmFleet", ShmStep]):
    """See :class:`moefleet.fleet.Handle` for the contract."""

    def combine_buffer(self) -> torch.Tensor | None:
        self._expect(Phase.RECEIVED, "combine_buffer")
        open_ = self._opened()
        if open_.blocks is not None:
            return None  # EXPERT_MAJOR: combine sums the rows where they lie
        return self._set(open_).combined[open_.dtype].view_as(open_.output.expert_tensors)

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        self._ids: npt.NDArray[np.int32] = topk_ids.numpy().astype(np.int32)
        self._weights: npt.NDArray[np.float32] = topk_weights.numpy().copy()

    def _set(self, open_: ShmStep) -> BufferSet:
        return self._fleet.buffers.sets[open_.step % SETS]

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> ShmStep:
        inbox = self._fleet.buffers.inbox(step, self._fleet.steps.open - {step})
        return ShmStep(step, dtype, scale_dtype, inbox.output(dtype, self._shape[1], scale_dtype), inbox=inbox)

    def _send_tokens(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        mine, rank = self._set(open_), self._fleet.bootstrap.rank
        count, topk = self._ids.shape
        mine.tokens[tokens.dtype][:count] = tokens
        if scales is not None and mine.scales is not None:
            mine.scales[:count].view(scales.dtype)[:] = scales
        mine.ids[rank][: count * topk] = self._ids.reshape(-1)
        mine.weights[rank][: count * topk] = self._weights.reshape(-1)
        code = row_code(tokens.dtype, open_.scale_dtype)
        self._fleet.steps.commit(Operation.DISPATCH, open_.step, tokens=count, topk=topk, dtype=code)
        self._fleet.tokens_sent += count

    def _receive_tokens(self, open_: ShmStep) -> None:
        fleet, theirs = self._fleet, self._set(open_)
        headers = fleet.steps.collect(Operation.DISPATCH, open_.step)
        open_.present = self._check_same(headers)
        topk = self._ids.shape[1]
        slots = [0 if header is None else header.tokens * topk for header in headers]
        got = arrivals(
            [ids[:count] for ids, count in zip(theirs.ids, slots, strict=True)],
            [weights[:count] for weights, count in zip(theirs.weights, slots, strict=True)],
            topk,
            fleet.local_table,
        )
        self._check_room(len(got.token))
        open_.bounds = got.bounds
        scale_table, scales = fleet.buffers.scale_table, None
        if scale_table is not None and theirs.scale_rows is not None:
            scales = scale_table, got.rows(theirs.scale_rows)
        rows = got.rows(theirs.token_rows)
        open_.blocks = open_.inbox.fill(got, fleet.buffers.tables[open_.dtype], rows, scales)
        fleet.rows_received += got.counts
        fleet.expert_rows.add(got, open_.blocks)
        fleet.steps.overtaken(open_.step)

    def _send_rows(self, open_: ShmStep, rows: torch.Tensor) -> None:
        assert open_.bounds is not None
        fleet, mine = self._fleet, self._set(open_)
        home = mine.combined[rows.dtype]
        starts = open_.bounds
        if fleet.params.layout is EpLayout.RANK_MAJOR:
            starts = np.arange(len(open_.bounds)) * fleet.params.max_tokens_per_rank
        if open_.blocks is not None:
            by = open_.blocks
            weighted_sum_bags(rows.reshape(-1, rows.shape[-1]), by.by_row, by.weight, by.bag, home[: len(by.bag) - 1])
        elif rows.data_ptr() != home.data_ptr():
            flat, counts = rows.reshape(-1, rows.shape[-1]), open_.bounds[1:] - open_.bounds[:-1]
            for at, count in zip(starts[:-1].tolist(), counts.tolist(), strict=True):
                home[at : at + count] = flat[at : at + count]
        mine.offsets[fleet.bootstrap.rank][0] = starts[:-1]
        mine.offsets[fleet.bootstrap.rank][1] = open_.bounds[1:] - open_.bounds[:-1]
        served = int(open_.bounds[-1])
        fleet.steps.commit(Operation.COMBINE, open_.step, tokens=served, topk=0, dtype=row_code(rows.dtype, None))

    def _receive_rows(self, open_: ShmStep) -> torch.Tensor:
        fleet, theirs = self._fleet, self._set(open_)
        rank, world = fleet.bootstrap.rank, fleet.bootstrap.world_size
        back = homecoming(self._ids, fleet.owner_table, world)
        present = self._check_same(fleet.steps.collect(Operation.COMBINE, open_.step, open_.present))
        starts, counts = np.array([offsets[:, rank] for offsets in theirs.offsets]).T
        if fleet.faults.tolerant:
            back = self._without_missing(back, present, counts)
            counts = np.bincount(back.rank, minlength=world)
        rows = (theirs.combined_rows + starts)[back.rank] + back.position
        summed = sum_bags(fleet.buffers.tables[open_.dtype], rows, back.bag)
        fleet.rows_sent += counts
        fleet.steps.overtaken(open_.step)
        return self._rescaled(summed, present) if fleet.renormalize else summed

    def _without_missing(self, back: Homecoming, present: int, counts: Ints) -> Homecoming:
        """Leave out what ranks would have sent that are missing, or that took this one for missing."""
        fleet, world = self._fleet, self._fleet.bootstrap.world_size
        here = (present >> np.arange(world)) & 1 > 0
        unserved = here & (counts != np.bincount(back.rank, minlength=world))
        if unserved.any():
            fleet.faults.behind = True
        return back if here.all() and not unserved.any() else back.only(here & ~unserved)

    def _rescaled(self, summed: torch.Tensor, present: int) -> torch.Tensor:
        """Rows that lost some of their experts, times (sum of all weights) / (sum of the live ones)."""
        fleet = self._fleet
        live = np.append((present >> np.arange(fleet.bootstrap.world_size)) & 1 > 0, False)
        owner = fleet.all_owner_table.take(self._ids, mode="wrap")
        total = self._weights.sum(axis=1, where=owner >= 0)
        left = self._weights.sum(axis=1, where=live[owner])
        lost = ((owner >= 0) & ~live[owner]).any(axis=1)
        factor = torch.from_numpy(np.divide(total, left, out=np.zeros_like(total), where=left != 0))[lost]
        summed[lost] = (summed[lost].float() * factor[:, None]).to(summed.dtype)
        return summed

    def _check_same(self, headers: Sequence[Header | None]) -> int:
        """All ranks bring rows of one type, and the same K, to a step. Returns who is present, as bits."""
        mine, present = headers[self._fleet.bootstrap.rank], 0
        assert mine is not None
        for rank, header in enumerate(headers):
            if header is None:
                continue
            present |= 1 << rank
            if header.topk != mine.topk or header.dtype != mine.dtype:
                theirs = f"K = {header.topk} and {code_name(header.dtype)}"
                raise MoEEpPeerError(
                    f"rank {rank} brought {theirs} to step {header.step}, this rank K = {mine.topk} and "
                    f"{code_name(mine.dtype)}; a step has one K and one row type",
                    rank=rank,
                    reason=theirs,
                )
        return present
