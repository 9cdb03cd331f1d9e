"""From ids to positions, in numpy: which rows a rank takes, where they go, and where a token's sums come from.

``T`` tokens of one rank, ``K`` slots, ``N`` rows that a rank takes in all, ``L`` its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """The rows that one rank takes in a step, by source rank, then token.

    Attributes:
        bounds: ``[W+1]`` where each source's rows begin.
        counts: ``[W]`` rows of each source.
        token: ``[N]`` the row's token, counted over all ranks' tokens in rank order.
        starts: ``[W]`` where each source's tokens begin in that count.
        local: ``[N, K]`` local expert of each slot, -1 = not here.
        weights: float32 ``[N, K]``, 0 where not here.
    """

    bounds: Ints
    counts: Ints
    token: Ints
    starts: Ints
    local: Ints
    weights: npt.NDArray[np.float32]

    def rows(self, firsts: Ints) -> Ints:
        """``[N]``: where each row lies in a table in which source ``s``'s token 0 is row ``firsts[s]``."""
        return self.token + np.repeat(firsts - self.starts, self.counts)


def arrivals(
    ids: Sequence[npt.NDArray[np.int32]], weights: Sequence[npt.NDArray[np.float32]], topk: int, local_table: Ints
) -> Arrivals:
    """Pick this rank's rows out of everybody's routing.

    Args:
        ids, weights: ``[T * K]`` of each source rank.
        topk: ``K``.
        local_table: ``[E+1]`` local expert of each id, -1 if elsewhere; the last entry is -1, for id -1.
    """
    local = local_table.take(np.concatenate(ids).reshape(-1, topk), mode="wrap")
    token = np.flatnonzero((local >= 0).any(axis=1))
    edges = np.array([0, *accumulate(len(part) // topk for part in ids)])
    bounds = token.searchsorted(edges)
    local = local.take(token, axis=0)
    kept = np.concatenate(weights).reshape(-1, topk).take(token, axis=0)
    kept[local < 0] = 0
    return Arrivals(bounds, bounds[1:] - bounds[:-1], token, edges[:-1], local, kept)


@dataclass(frozen=True)
class ExpertBlocks:
    """EXPERT_MAJOR: one entry per (row, expert), by expert, then row.

    Attributes:
        counts: ``[L]`` entries of each expert.
        row: ``[n]`` which of the arrivals.
        position: ``[n]`` place in the flat ``[L * capacity]`` output.
        by_row: ``[n]`` positions in order of row, then expert: what each row's sum is made of.
        weight: float32 ``[n]`` in that order, the sum of the slots that name the expert.
        bag: ``[N+1]`` where each row's part begins in that order.
    """

    counts: Ints
    row: Ints
    position: Ints
    by_row: Ints
    weight: npt.NDArray[np.float32]
    bag: Ints


def expert_blocks(local: Ints, weights: npt.NDArray[np.float32], num_local: int, capacity: int) -> ExpertBlocks:
    """Sort arrivals by expert. An expert that a token names twice gets one entry with the summed weight."""
    taken, slots = local.shape
    row_of_slot = np.repeat(np.arange(taken), slots)
    flat = local.reshape(-1)
    member = np.zeros((num_local + 1, taken), bool)  # the last line takes what is not here
    member[flat, row_of_slot] = True
    expert, row = np.nonzero(member[:num_local])
    counts = np.bincount(expert, minlength=num_local)
    position = np.arange(len(row)) + np.repeat(np.arange(num_local) * capacity - (np.cumsum(counts) - counts), counts)
    order = np.argsort(row.astype(np.uint16) if taken <= 2**16 else row, kind="stable")
    cell = row_of_slot * (num_local + 1) + flat + (flat < 0) * (num_local + 1)
    summed = np.bincount(cell, weights.reshape(-1), taken * (num_local + 1)).astype(np.float32)
    row_sorted = row[order]
    bag = np.searchsorted(row_sorted, np.arange(taken + 1))
    return ExpertBlocks(
        counts, row, position, position[order], summed[row_sorted * (num_local + 1) + expert[order]], bag
    )


@dataclass(frozen=True)
class Homecoming:
    """Where a rank's own tokens find their sums: one entry per (token, rank that served it), by token, then rank.

    Attributes:
        rank: ``[n]`` the serving rank.
        position: ``[n]`` which of this rank's rows there.
        bag: ``[T+1]`` where each token's entries begin.
    """

    rank: Ints
    position: Ints
    bag: Ints

    def only(self, ranks: npt.NDArray[np.bool_]) -> Homecoming:
        """Without the entries of ranks that ``ranks`` ``[W]`` is false for."""
        kept = ranks[self.rank]
        bag = np.append(0, np.cumsum(kept))[self.bag]
        return Homecoming(self.rank[kept], self.position[kept], bag)


def homecoming(ids: npt.NDArray[np.int32], owner_table: Ints, world_size: int) -> Homecoming:
    """Args: ids ``[T, K]``; owner_table ``[E+1]`` rank of each id, -1 if nobody's, the last entry -1 for id -1."""
    tokens = len(ids)
    served = np.zeros((tokens, world_size + 1), bool)  # the last column takes -1
    served[np.arange(tokens)[:, None], owner_table[ids]] = True
    served = served[:, :world_size]
    token, rank = np.nonzero(served)
    position = (np.cumsum(served, axis=0) - 1)[token, rank]
    bag = np.zeros(tokens + 1, np.int64)
    np.cumsum(served.sum(axis=1), out=bag[1:])
    return Homecoming(rank, position, bag)
