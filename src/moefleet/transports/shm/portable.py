"""The movements in numpy and torch: what runs where there is no compiled helper."""

from __future__ import annotations

import numpy as np
import torch

from ...config import EpLayout, FleetParams
from ...placement import Placement
from ...substrate.control import as_flags
from ...substrate.gather import sum_bags, weighted_sum_bags
from ...substrate.inbox import Inbox
from ...substrate.routes import Arrivals, ExpertBlocks, Homecoming, Ints, arrivals_among, count_to, homecoming
from ...substrate.tally import ExpertTally
from .buffers import Buffers, BufferSet
from .moves import Moves, Ranks, Routing


class PortableInbox(Inbox):
    """``got``: which rows arrived; ``blocks``: how they are sorted, in EXPERT_MAJOR."""

    got: Arrivals
    blocks: ExpertBlocks | None


class PortableMoves(Moves[PortableInbox]):
    """See :class:`Moves`.

    Args:
        buffers: views of all memory.
    """

    in_c = False

    def __init__(
        self, params: FleetParams, placement: Placement, rank: int, owners: Ints, buffers: Buffers[PortableInbox]
    ) -> None:
        super().__init__(params, placement, rank, owners)
        self._buffers, self._tally = buffers, ExpertTally(placement.num_local(rank))
        self._used = [0] * len(buffers.sets)  # slots of this rank's that hold ids, from the front

    def tokens_per_expert(self) -> list[int]:
        return self._tally.tolist()

    def store(self, at: BufferSet, tokens: torch.Tensor | None, scales: torch.Tensor | None, routing: Routing) -> None:
        assert tokens is not None, "nothing is placed without the helper"
        count, slots, used = len(tokens), routing.ids.size, self._used[at.parity]
        at.tokens[tokens.dtype][:count] = tokens
        if scales is not None and at.scales is not None:
            at.scales[:count].view(scales.dtype)[:] = scales
        at.ids[:slots], at.weights[:slots] = routing.ids.reshape(-1), routing.weights.reshape(-1)
        if used > slots:
            at.ids[slots:used] = -1
        self._used[at.parity] = slots

    def arrive(self, at: BufferSet, inbox: PortableInbox, tokens: Ranks, placed: Ranks, present: int, topk: int) -> int:
        most = max(tokens)
        ids = at.all_ids[:, : most * topk].reshape(-1, topk)
        if present != self._everybody:
            ids = ids.copy()
            for rank in range(self._world):
                if not present >> rank & 1:
                    ids[rank * most : (rank + 1) * most] = -1
        weights = at.all_weights[:, : most * topk].reshape(-1, topk)
        inbox.got = arrivals_among(ids, weights, count_to(self._world + 1) * most, self.local)
        return len(inbox.got.token)

    def gather(self, at: BufferSet, inbox: PortableInbox, dtype: torch.dtype, step: int) -> None:
        got, scale_table, scales = inbox.got, self._buffers.scale_table, None
        if scale_table is not None and at.scale_rows is not None:
            scales = scale_table, got.rows(at.scale_rows)
        inbox.blocks = inbox.fill(got, self._buffers.tables[dtype], got.rows(at.token_rows), scales)
        self.rows_received += got.counts
        self._tally.add(got, inbox.blocks)

    def give(self, at: BufferSet, inbox: PortableInbox, rows: torch.Tensor) -> int:
        got, by, home = inbox.got, inbox.blocks, at.combined[rows.dtype]
        if self._params.layout is not EpLayout.RANK_MAJOR:  # there they are always the same
            at.offsets[0] = got.bounds[:-1]
        at.offsets[1] = got.counts
        if by is not None:
            weighted_sum_bags(rows.reshape(-1, rows.shape[-1]), by.by_row, by.weight, by.bag, home[: len(by.bag) - 1])
        elif rows.data_ptr() != home.data_ptr():
            flat = rows.reshape(-1, rows.shape[-1])
            for first, count in zip(at.offsets[0].tolist(), got.counts.tolist(), strict=True):
                home[first : first + count] = flat[first : first + count]
        return 0

    def sum(
        self,
        at: BufferSet,
        routing: Routing,
        present: int,
        placed: Ranks,
        dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int | None]:
        if routing.back is None or routing.back[0] is not self.owners:
            routing.back = self.owners, homecoming(routing.ids, self.owners, self._world)
        starts, counts = at.my_offsets.T
        back, unserved = self._without_missing(routing.back[1], present, starts, counts)
        counts = np.bincount(back.rank, minlength=self._world)
        rows = (at.combined_rows + starts)[back.rank] + back.position
        summed = sum_bags(self._buffers.tables[dtype], rows, back.bag)
        self.rows_sent += counts
        return summed, unserved

    def _without_missing(
        self, back: Homecoming, present: int, starts: Ints, counts: Ints
    ) -> tuple[Homecoming, int | None]:
        """Leave out what ranks would have sent that are missing, or that took this one for missing, and name one."""
        here = as_flags(present, self._world)
        due, room = np.bincount(back.rank, minlength=self._world), self._params.recv_capacity(self._world)
        unserved = here & ((counts != due) | (starts < 0) | (starts > room - due))
        if here.all() and not unserved.any():
            return back, None
        return back.only(here & ~unserved), int(unserved.argmax()) if unserved.any() else None
