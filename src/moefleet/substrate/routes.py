"""From ids to positions, in numpy: which rows a rank takes, where they go, and where a token's sums come from.

``T`` tokens of one rank, ``K`` slots, ``N`` rows that a rank takes in all, ``L`` its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@lru_cache(maxsize=256)
def count_to(n: int) -> Ints:
    """0, 1, ... ``n - 1``, shared and read-only."""
    numbers = np.arange(n)
    numbers.flags.writeable = False
    return numbers


@dataclass(frozen=True)
class Arrivals:
    """The rows that one rank takes in a step, by source rank, then token.

    Attributes:
        bounds: ``[W+1]`` where each source's rows begin.
        counts: ``[W]`` rows of each source.
        token: ``[N]`` the row's token, counted over all ranks' tokens in rank order.
        starts: ``[W]`` where each source's tokens begin in that count.
        local: ``[N, K]`` local expert of each slot, -1 = not here.
        weights: float32 ``[N, K]``; what it holds for a slot that is not here means nothing.
    """

    bounds: Ints
    counts: Ints
    token: Ints
    starts: Ints
    local: Ints
    weights: npt.NDArray[np.float32]

    def rows(self, firsts: Ints) -> Ints:
        """``[N]``: where each row lies in a table in which source ``s``'s token 0 is row ``firsts[s]``."""
        return self.token + (firsts - self.starts).repeat(self.counts)


def arrivals(
    ids: Sequence[npt.NDArray[np.int32]], weights: Sequence[npt.NDArray[np.float32]], topk: int, local_table: Ints
) -> Arrivals:
    """Pick this rank's rows out of everybody's routing.

    Args:
        ids, weights: ``[T * K]`` of each source rank.
        topk: ``K``.
        local_table: ``[E+1]`` local expert of each id, -1 if elsewhere; the last entry is -1, for id -1.
    """
    edges = np.array([0, *accumulate(len(part) // topk for part in ids)])
    together = np.concatenate(ids).reshape(-1, topk), np.concatenate(weights).reshape(-1, topk)
    return arrivals_among(*together, edges, local_table)


def arrivals_among(
    ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32], edges: Ints, local_table: Ints
) -> Arrivals:
    """The same where all ranks' routing ``[R, K]`` lies together, source ``s``'s from row ``edges[s]`` on."""
    local = local_table.take(ids, mode="wrap")
    token = np.asarray((local >= 0).any(axis=1)).nonzero()[0]
    bounds = token.searchsorted(edges)
    counts = bounds[1:] - bounds[:-1]
    return Arrivals(bounds, counts, token, edges[:-1], local.take(token, axis=0), weights.take(token, axis=0))


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
    taken, wide = len(local), num_local + 1
    # A cell for each (row, expert), and in front of each row's one for what is not here.
    cell = local + (count_to(taken)[:, None] * wide + 1)
    member = np.zeros((taken, wide), bool)
    member.reshape(-1)[cell] = True
    member[:, 0] = False
    row, expert = member.nonzero()
    summed = np.bincount(cell.reshape(-1), weights.reshape(-1), taken * wide).astype(np.float32)
    weight = summed[row * wide + expert]
    order = (expert.astype(np.uint16) if wide <= 2**16 else expert).argsort(kind="stable")
    counts = np.bincount(expert, minlength=wide)[1:]
    first: Ints = count_to(num_local) * capacity + counts - counts.cumsum()
    position = count_to(len(row)) + first.repeat(counts)
    by_row = np.empty_like(position)
    by_row[order] = position
    return ExpertBlocks(counts, row[order], position, by_row, weight, row.searchsorted(count_to(taken + 1)))


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
    served[count_to(tokens)[:, None], owner_table.take(ids, mode="wrap")] = True
    token, rank = served[:, :world_size].nonzero()
    position = served.cumsum(axis=0)[token, rank] - 1
    return Homecoming(rank, position, token.searchsorted(count_to(tokens + 1)))
