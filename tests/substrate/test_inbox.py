"""What a rank receives into: shapes in every layout, routing that is gone with its step, ranks without experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefleet import EpAlgorithm, EpLayout, FleetParams
from moefleet.substrate.inbox import Inbox
from moefleet.substrate.routes import Arrivals, arrivals

W, M, H, E = 2, 3, 4, 4


def params_for(layout: EpLayout, **changes: int) -> FleetParams:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    return FleetParams(E, M, H, 4, algorithm, layout, **changes)


def arrived(*ids: list[list[int]], num_local: int = 2) -> Arrivals:
    """At rank 0, which holds the first experts."""
    table = np.array([expert if expert < num_local else -1 for expert in range(E)] + [-1])
    flat = [np.array(rank, np.int32).reshape(-1) for rank in ids]
    return arrivals(flat, [np.full(len(part), 0.5, np.float32) for part in flat], len(ids[0][0]), table)


FIRSTS = np.array([0, 10])
TABLE = torch.arange(20.0).repeat_interleave(H).view(20, H)
"""Rank 0's tokens from row 0 on, rank 1's from row 10 on; each row holds its own number."""


def test_expert_major() -> None:
    inbox = Inbox(params_for(EpLayout.EXPERT_MAJOR), W, 2)
    out = inbox.output(torch.float32, 2, None)
    got = arrived([[0, 1], [2, -1]], [[1, 1], [3, 0]])
    blocks = inbox.fill(got, TABLE, got.rows(FIRSTS))
    assert out.expert_tensors.shape == (2, W * M, H) and out.recv_topk_idx is None
    assert out.expert_counts is not None and out.expert_counts.tolist() == [2, 2]
    assert out.expert_tensors[0, :2, 0].tolist() == [0, 11]
    assert out.expert_tensors[1, :2, 0].tolist() == [0, 10]
    assert blocks is not None and blocks.weight.tolist() == [0.5, 0.5, 1.0, 0.5]


def test_rank_major() -> None:
    inbox = Inbox(params_for(EpLayout.RANK_MAJOR), W, 2)
    out = inbox.output(torch.float32, 2, None)
    got = arrived([[2, 3], [0, 2]], [[1, 1], [3, 0]])
    assert inbox.fill(got, TABLE, got.rows(FIRSTS)) is None
    assert out.expert_counts is not None and out.expert_counts.tolist() == [1, 2]
    assert out.expert_tensors[0, 0, 0] == 1 and out.expert_tensors[1, :2, 0].tolist() == [10, 11]
    assert out.recv_topk_idx is not None and out.recv_topk_weights is not None
    assert out.recv_topk_idx.tolist() == [[[0, -1]] + [[-1, -1]] * 2, [[1, 1], [-1, 0], [-1, -1]]]
    assert out.recv_topk_weights.tolist() == [[[0.5, 0]] + [[0, 0]] * 2, [[0.5, 0.5], [0, 0.5], [0, 0]]]


def test_flat() -> None:
    inbox = Inbox(params_for(EpLayout.FLAT, max_recv_tokens_per_rank=4), W, 2)
    out = inbox.output(torch.float32, 2, None)
    got = arrived([[2, 3], [0, 2]], [[1, 1], [3, 0]])
    inbox.fill(got, TABLE, got.rows(FIRSTS))
    assert out.expert_tensors.shape == (4, H) and out.expert_counts is None
    assert out.recv_total_counter is not None and out.recv_total_counter.tolist() == [3]
    assert out.expert_tensors[:3, 0].tolist() == [1, 10, 11]
    assert out.recv_topk_idx is not None and out.recv_topk_idx.tolist() == [[0, -1], [1, 1], [-1, 0], [-1, -1]]


@pytest.mark.parametrize("layout", [EpLayout.RANK_MAJOR, EpLayout.FLAT])
def test_routing_of_the_step_before_is_gone(layout: EpLayout) -> None:
    inbox = Inbox(params_for(layout), W, 2)
    full, one = arrived([[0, 1]] * M, [[1, 0]] * M), arrived([[2, 3]], [[1, 3]])
    for got in (full, one, full, one):
        out = inbox.output(torch.float32, 2, None)
        inbox.fill(got, TABLE, got.rows(FIRSTS))
        assert out.recv_topk_idx is not None and out.recv_topk_weights is not None
        assert int((out.recv_topk_idx >= 0).sum()) == int((got.local >= 0).sum())
        assert int((out.recv_topk_weights != 0).sum()) == int((got.local >= 0).sum())


@pytest.mark.parametrize("layout", [EpLayout.RANK_MAJOR, EpLayout.FLAT])
def test_another_topk_after_a_full_step(layout: EpLayout) -> None:
    inbox = Inbox(params_for(layout), W, 2)
    inbox.output(torch.float32, 2, None)
    full = arrived([[0, 1]] * M, [[1, 0]] * M)
    inbox.fill(full, TABLE, full.rows(FIRSTS))
    out, got = inbox.output(torch.float32, 3, None), arrived([[2, 3, -1]], [[1, 3, 0]])
    inbox.fill(got, TABLE, got.rows(FIRSTS))
    assert out.recv_topk_idx is not None and out.recv_topk_idx.shape[-1] == 3
    assert sorted(out.recv_topk_idx[out.recv_topk_idx >= 0].tolist()) == [0, 1]


@pytest.mark.parametrize("layout", list(EpLayout))
@pytest.mark.parametrize("scales", [0, 6])
def test_a_rank_without_experts(layout: EpLayout, scales: int) -> None:
    inbox = Inbox(params_for(layout, scale_bytes_per_token=scales), W, 0)
    out = inbox.output(torch.float32, 2, torch.float16 if scales else None)
    got = arrived([[0, 1]], [[1, 3]], num_local=0)
    table = torch.zeros(20, scales, dtype=torch.uint8)
    inbox.fill(got, TABLE, got.rows(FIRSTS), (table, got.rows(FIRSTS)) if scales else None)
    assert out.get_num_tokens() == 0
    assert out.expert_tensors.shape == {
        EpLayout.EXPERT_MAJOR: (0, W * M, H), EpLayout.RANK_MAJOR: (W, M, H), EpLayout.FLAT: (W * M, H)
    }[layout]  # fmt: skip
    if scales:
        assert out.expert_scales is not None and out.expert_scales.shape == (*out.expert_tensors.shape[:-1], 3)


@pytest.mark.parametrize("layout", list(EpLayout))
def test_scales_go_where_their_rows_go(layout: EpLayout) -> None:
    inbox = Inbox(params_for(layout, scale_bytes_per_token=2), W, 2)
    out = inbox.output(torch.float32, 2, torch.int16)
    got = arrived([[0, 1], [2, -1]], [[1, 1], [3, 0]])
    table = torch.arange(100, 120, dtype=torch.int16)[:, None].view(torch.uint8)
    inbox.fill(got, TABLE, got.rows(FIRSTS), (table, got.rows(FIRSTS)))
    assert out.expert_scales is not None
    counts = out.recv_total_counter if out.expert_counts is None else out.expert_counts
    assert counts is not None
    rows = out.expert_tensors.view(-1, M if layout is EpLayout.RANK_MAJOR else W * M, H)
    scales = out.expert_scales.view(*rows.shape[:2], 1)
    for block, count in enumerate(counts.tolist()):
        assert (scales[block, :count, 0] - 100).tolist() == rows[block, :count, 0].tolist()
