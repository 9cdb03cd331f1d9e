"""One step over shared memory: store, commit, gather; store, commit, sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ...config import EpLayout
from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...substrate.control import SETS, Operation
from ...substrate.gather import sum_bags, weighted_sum_bags
from ...substrate.inbox import Inbox
from ...substrate.routes import Arrivals, ExpertBlocks, Homecoming, Ints, arrivals_among, count_to, homecoming
from ...substrate.rowtypes import row_code
from .buffers import BufferSet

if TYPE_CHECKING:
    from .fleet import ShmFleet  # noqa: F401 - named in a string below


@dataclass(kw_only=True)
class ShmStep(OpenStep):
    """``inbox``: what receives the rows; ``got``: which they are; ``blocks``: how they are sorted, in EXPERT_MAJOR;
    ``present``: the ranks that took part in dispatch, as bits."""

    inbox: Inbox
    got: Arrivals | None = None
    blocks: ExpertBlocks | None = None
    present: int = 0


class ShmHandle(HalvesHandle["ShmFleet", ShmStep]):
    """See :class:`moefleet.fleet.Handle` for the contract."""

    def combine_buffer(self) -> torch.Tensor | None:
        self._expect(Phase.RECEIVED, "combine_buffer")
        open_ = self._opened()
        if open_.blocks is not None:
            return None  # EXPERT_MAJOR: combine sums the rows where they lie
        self._fleet.steps.write_combined(open_.step)
        return self._set(open_).combined[open_.dtype].view_as(open_.output.expert_tensors)

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        self._ids: npt.NDArray[np.int32] = topk_ids.numpy().astype(np.int32)
        self._weights: npt.NDArray[np.float32] = topk_weights.numpy().copy()
        self._snapshot_back()

    def _snapshot_back(self) -> None:
        """Where the sums will be, under the mask in force."""
        self._back_epoch = self._fleet.mask_changes
        self._back = homecoming(self._ids, self._fleet.owner_table, self._fleet.bootstrap.world_size)
        if self._fleet.faults.tolerant:
            self._back_counts = np.bincount(self._back.rank, minlength=self._fleet.bootstrap.world_size)

    def _set(self, open_: ShmStep) -> BufferSet:
        return self._fleet.buffers.sets[open_.step % SETS]

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> ShmStep:
        inbox = self._fleet.buffers.inbox(step, self._fleet.steps.open - {step})
        return ShmStep(step, dtype, scale_dtype, inbox.output(dtype, self._shape[1], scale_dtype), inbox=inbox)

    def _send_tokens(self, open_: ShmStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        fleet, mine = self._fleet, self._set(open_)
        count, topk = self._ids.shape
        mine.tokens[tokens.dtype][:count] = tokens
        if scales is not None and mine.scales is not None:
            mine.scales[:count].view(scales.dtype)[:] = scales
        slots, stale = count * topk, fleet.slots_used[open_.step % SETS]
        mine.ids[:slots], mine.weights[:slots] = self._ids.reshape(-1), self._weights.reshape(-1)
        if stale > slots:
            mine.ids[slots:stale] = -1
        fleet.slots_used[open_.step % SETS] = slots
        code = row_code(tokens.dtype, open_.scale_dtype)
        fleet.steps.commit(Operation.DISPATCH, open_.step, tokens=count, topk=topk, dtype=code)
        fleet.tokens_sent += count

    def _receive_tokens(self, open_: ShmStep) -> None:
        fleet, theirs = self._fleet, self._set(open_)
        world, topk = fleet.bootstrap.world_size, self._ids.shape[1]
        tokens, open_.present = fleet.steps.collect(Operation.DISPATCH, open_.step)
        most = max(tokens)
        ids = theirs.all_ids[:, : most * topk].reshape(-1, topk)
        if open_.present != fleet.faults.everybody:
            ids = ids.copy()
            for rank in range(world):
                if not open_.present >> rank & 1:
                    ids[rank * most : (rank + 1) * most] = -1
        weights = theirs.all_weights[:, : most * topk].reshape(-1, topk)
        got = arrivals_among(ids, weights, count_to(world + 1) * most, fleet.local_table)
        self._check_room(len(got.token))
        open_.got = got
        scale_table, scales = fleet.buffers.scale_table, None
        if scale_table is not None and theirs.scale_rows is not None:
            scales = scale_table, got.rows(theirs.scale_rows)
        rows = got.rows(theirs.token_rows)
        open_.blocks = open_.inbox.fill(got, fleet.buffers.tables[open_.dtype], rows, scales)
        fleet.rows_received += got.counts
        fleet.expert_rows.add(got, open_.blocks)
        fleet.steps.overtaken(Operation.DISPATCH, open_.step)

    def _send_rows(self, open_: ShmStep, rows: torch.Tensor) -> None:
        got, by = open_.got, open_.blocks
        assert got is not None
        fleet, mine = self._fleet, self._set(open_)
        home = mine.combined[rows.dtype]
        fleet.steps.write_combined(open_.step)
        if fleet.params.layout is not EpLayout.RANK_MAJOR:  # there they are always the same
            mine.offsets[0] = got.bounds[:-1]
        mine.offsets[1] = got.counts
        if by is not None:
            weighted_sum_bags(rows.reshape(-1, rows.shape[-1]), by.by_row, by.weight, by.bag, home[: len(by.bag) - 1])
        elif rows.data_ptr() != home.data_ptr():
            flat = rows.reshape(-1, rows.shape[-1])
            for at, count in zip(mine.offsets[0].tolist(), got.counts.tolist(), strict=True):
                home[at : at + count] = flat[at : at + count]
        code = row_code(rows.dtype, None)
        fleet.steps.commit(Operation.COMBINE, open_.step, tokens=len(got.token), topk=0, dtype=code)

    def _receive_rows(self, open_: ShmStep) -> torch.Tensor:
        fleet, theirs = self._fleet, self._set(open_)
        if self._back_epoch != fleet.mask_changes:
            self._snapshot_back()
        back = self._back
        _, present = fleet.steps.collect(Operation.COMBINE, open_.step, open_.present)
        starts, counts = theirs.my_offsets.T
        if fleet.faults.tolerant and (present != fleet.faults.everybody or (counts != self._back_counts).any()):
            back = self._without_missing(back, present, counts)
            counts = np.bincount(back.rank, minlength=fleet.bootstrap.world_size)
        rows = (theirs.combined_rows + starts)[back.rank] + back.position
        summed = sum_bags(fleet.buffers.tables[open_.dtype], rows, back.bag)
        fleet.rows_sent += counts
        fleet.steps.overtaken(Operation.COMBINE, open_.step)
        return self._rescaled(summed, present) if fleet.renormalize else summed

    def _without_missing(self, back: Homecoming, present: int, counts: Ints) -> Homecoming:
        """Leave out what ranks would have sent that are missing, or that took this one for missing."""
        fleet, world = self._fleet, self._fleet.bootstrap.world_size
        here = (present >> np.arange(world)) & 1 > 0
        unserved = here & (counts != self._back_counts)
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
