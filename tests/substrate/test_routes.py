"""Ids to positions, against the same in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moefleet import Placement
from moefleet.substrate.routes import arrivals, expert_blocks, homecoming
from tests.strategies import make_placement

quickly = settings(max_examples=150, deadline=None, derandomize=True)


@dataclass
class Routing:
    """All ranks' ids and weights as nested lists, and who holds what."""

    placement: Placement
    topk: int
    ids: list[list[list[int]]]  # [W][T][K]
    weights: list[list[list[float]]]

    def flat(self, part: list[list[list[Any]]], dtype: Any) -> list[np.ndarray]:
        return [np.array(rank, dtype).reshape(-1) for rank in part]

    def local(self, rank: int, expert: int) -> int:
        """Local index of an expert on a rank, -1 if it is not there."""
        held = self.placement.experts_of(rank)
        return held.index(expert) if expert >= 0 and expert in held else -1

    def local_table(self, rank: int) -> np.ndarray:
        return np.append(self.placement.local_table(rank).numpy(), -1)

    @property
    def owner_table(self) -> np.ndarray:
        return np.append(self.placement.owner_table.numpy(), -1)


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    world, experts, topk = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    placement = Placement.contiguous(experts, world)
    if draw(st.booleans()):
        placement = make_placement(draw(st.integers(0, 99)), experts, world)
    row = st.lists(st.integers(-1, experts - 1), min_size=topk, max_size=topk)
    ids = [draw(st.lists(row, max_size=5)) for _ in range(world)]
    quarters = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=topk, max_size=topk)
    weights = [[draw(quarters) for _ in rank] for rank in ids]
    return Routing(placement, topk, ids, weights)


@quickly
@given(routings())
def test_arrivals(routing: Routing) -> None:
    """By source rank, then token; each token once if any of its experts is here."""
    world = routing.placement.world_size
    for rank in range(world):
        table = routing.local_table(rank)
        ids, weights = routing.flat(routing.ids, np.int32), routing.flat(routing.weights, np.float32)
        got = arrivals(ids, weights, routing.topk, table)
        bounds, tokens, local, kept, counted = [0], [], [], [], 0
        for theirs, shares in zip(routing.ids, routing.weights):
            for token, (row, share) in enumerate(zip(theirs, shares)):
                here = [routing.local(rank, expert) for expert in row]
                if max(here) >= 0:
                    tokens.append(counted + token)
                    local.append(here)
                    kept.append(share)
            counted += len(theirs)
            bounds.append(len(tokens))
        assert got.bounds.tolist() == bounds
        assert got.counts.tolist() == np.diff(bounds).tolist()
        assert got.token.tolist() == tokens
        assert got.local.tolist() == local
        here_only = np.where(got.local >= 0, got.weights, 0)
        assert here_only.tolist() == [[w if e >= 0 else 0 for w, e in zip(*row)] for row in zip(kept, local)]
        firsts = np.array([1000 * source for source in range(world)])
        starts = np.cumsum([0, *map(len, routing.ids)])
        sources = np.repeat(np.arange(world), np.diff(bounds))
        assert got.rows(firsts).tolist() == [1000 * s + t - starts[s] for s, t in zip(sources, tokens)]


@quickly
@given(routings(), st.integers(0, 3))
def test_expert_blocks(routing: Routing, spare: int) -> None:
    """By expert, then row; an expert that a row names twice once, with the sum of the weights."""
    for rank in range(routing.placement.world_size):
        ids, weights = routing.flat(routing.ids, np.int32), routing.flat(routing.weights, np.float32)
        got = arrivals(ids, weights, routing.topk, routing.local_table(rank))
        num_local, capacity = routing.placement.num_local(rank), len(got.token) + spare
        blocks = expert_blocks(got.local, got.weights, num_local, capacity)
        rows: list[list[int]] = [[] for _ in range(num_local)]
        place: dict[tuple[int, int], int] = {}
        for row, experts in enumerate(got.local.tolist()):
            for expert in sorted({*experts} - {-1}):
                place[row, expert] = expert * capacity + len(rows[expert])
                rows[expert].append(row)
        assert blocks.counts.tolist() == [len(block) for block in rows]
        assert blocks.row.tolist() == [row for block in rows for row in block]
        assert blocks.position.tolist() == [
            expert * capacity + n for expert, block in enumerate(rows) for n in range(len(block))
        ]
        by_row = sorted(place)
        assert blocks.by_row.tolist() == [place[pair] for pair in by_row]
        assert blocks.weight.tolist() == [
            sum(w for w, e in zip(got.weights[row].tolist(), got.local[row].tolist()) if e == expert)
            for row, expert in by_row
        ]
        assert blocks.weight.dtype == np.float32
        assert blocks.bag.tolist() == [sum(row < edge for row, _ in by_row) for edge in range(len(got.token) + 1)]


@quickly
@given(routings(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_homecoming(routing: Routing, kept: list[bool]) -> None:
    """Each token finds its row on every rank that served it: the n-th of this rank's rows there."""
    world = routing.placement.world_size
    for ids in routing.ids:
        matrix = np.array(ids, np.int32).reshape(len(ids), routing.topk)
        back = homecoming(matrix, routing.owner_table, world)
        sent = [0] * world
        entries, bag = [], [0]
        for row in ids:
            for rank in sorted({routing.placement.owner_of(expert) for expert in row} - {-1}):
                entries.append((rank, sent[rank]))
                sent[rank] += 1
            bag.append(len(entries))
        assert list(zip(back.rank.tolist(), back.position.tolist())) == entries
        assert back.bag.tolist() == bag
        only = back.only(np.array(kept[:world]))
        assert list(zip(only.rank.tolist(), only.position.tolist())) == [e for e in entries if kept[e[0]]]
        assert only.bag.tolist() == [sum(kept[rank] for rank, _ in entries[:edge]) for edge in bag]


def test_weights_of_absent_slots_may_hold_anything() -> None:
    """NaN beside a -1 stays there."""
    ids, nan = np.array([0, -1, 1, 1], np.int32), float("nan")
    got = arrivals([ids], [np.array([0.5, nan, 1, 2], np.float32)], 2, np.array([0, 1, -1]))
    blocks = expert_blocks(got.local, got.weights, 2, 8)
    assert blocks.weight.tolist() == [0.5, 3.0]


def test_many_experts_and_rows() -> None:
    """Past the 16 bits that sorting by expert uses where it can."""
    experts = 70_000
    local = np.array([[experts - 1, 0], [65_536, experts - 1], [3, 3]])
    blocks = expert_blocks(local, np.ones((3, 2), np.float32), experts, 4)
    assert np.flatnonzero(blocks.counts).tolist() == [0, 3, 65_536, experts - 1]
    assert blocks.row.tolist() == [0, 2, 1, 0, 1]
    assert blocks.by_row.tolist() == [0, 4 * (experts - 1), 4 * 65_536, 4 * (experts - 1) + 1, 12]
    assert blocks.weight.tolist() == [1, 1, 1, 1, 2]
