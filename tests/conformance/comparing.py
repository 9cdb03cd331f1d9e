"""What ranks brought back, held against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from moefleet import DispatchOutput, EpLayout, FleetParams, reference
from tests.conformance.context import Received, gain_of
from tests.strategies import Problem


def dispatched(problem: Problem, params: FleetParams, scales: Sequence[torch.Tensor] | None = None):
    """What each rank receives."""
    if scales is None:
        return dispatched_alone(problem, params)
    return reference.dispatch(problem.xs, *problem.routing, params, scales=scales)


@lru_cache(maxsize=16)  # many tests repeat a step
def dispatched_alone(problem: Problem, params: FleetParams) -> list[DispatchOutput]:
    return reference.dispatch(problem.xs, *problem.routing, params)


@lru_cache(maxsize=16)
def answers(problem: Problem, num_experts: int) -> list[torch.Tensor]:
    """What comes home from this suite's experts, in float64: gains are exact, so they may go into the weights."""
    gained = [
        weights * gain_of(ids.double()).to(weights)
        for ids, weights in zip(problem.topk_ids, problem.topk_weights, strict=True)
    ]
    return reference.identity_forward(problem.xs, problem.topk_ids, gained, num_experts)


def check_step(
    problem: Problem,
    params: FleetParams,
    got: Sequence[tuple[Received, torch.Tensor]],
    canonical: bool,
    scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """All ranks' dispatch outputs, row by row, and their results."""
    wanted = dispatched(problem, params, scales)
    for rank, ((received, _), want) in enumerate(zip(got, wanted, strict=True)):
        check_received(f"rank {rank}", received, want, params, canonical)
    check_results(problem, params, [y for _, y in got])


def check_results(problem: Problem, params: FleetParams, ys: Sequence[torch.Tensor]) -> None:
    """Within the reference's tolerance; a token without an expert exactly zero."""
    dtype = problem.xs[0].dtype
    allowed = reference.tolerance(dtype, problem.world_size, problem.topk, largest(problem))
    for rank, (y, want) in enumerate(zip(ys, answers(problem, params.num_experts), strict=True)):
        assert y.dtype == dtype and y.shape == want.shape, f"rank {rank}: {y.dtype} {list(y.shape)}"
        torch.testing.assert_close(
            y.double(), want, rtol=0, atol=allowed, msg=lambda text, rank=rank: f"rank {rank}: {text}"
        )
        alone = (problem.topk_ids[rank] < 0).all(1)
        assert not y[alone].any(), f"rank {rank}: a token without an expert is exactly 0"


def check_received(where: str, got: Received, want: DispatchOutput, params: FleetParams, canonical: bool) -> None:
    """Shapes and counts exactly; the rows that exist one by one; ids and weights past the counts -1 and 0."""
    assert got.rows.shape == want.expert_tensors.shape and got.rows.dtype == want.expert_tensors.dtype, where
    for name, mine, theirs in (
        ("expert_counts", got.counts, want.expert_counts),
        ("recv_total_counter", got.total, want.recv_total_counter),
    ):
        assert (mine is None) == (theirs is None), f"{where}: {name}"
        if mine is not None and theirs is not None:
            assert mine.dtype == torch.int32 and mine.tolist() == theirs.tolist(), f"{where}: {name}"
    counts = (want.expert_counts if want.expert_counts is not None else want.recv_total_counter).tolist()
    flat = params.layout is EpLayout.FLAT
    fronts = [(slice(counts[0]),)] if flat else [(block, slice(count)) for block, count in enumerate(counts)]
    for front in fronts:
        rows, wanted = [got.rows[front]], [want.expert_tensors[front]]
        if want.recv_topk_idx is not None:
            rows += [got.ids[front], got.weights[front]]
            wanted += [want.recv_topk_idx[front], want.recv_topk_weights[front]]
        if want.expert_scales is not None:
            rows.append(got.scales[front])
            wanted.append(want.expert_scales[front].view(torch.uint8))
        if not canonical:
            rows, wanted = in_some_order(rows), in_some_order(wanted)
        for mine, theirs in zip(rows, wanted, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), f"{where}, block {front}"
    if want.recv_topk_idx is None:
        assert got.ids is None and got.weights is None, f"{where}: EXPERT_MAJOR returns no routing"
        return
    past = torch.ones(got.ids.shape, dtype=torch.bool)
    for front in fronts:
        past[front] = False
    assert (got.ids[past] == -1).all() and not got.weights[past].any(), f"{where}: routing past the counts"


def in_some_order(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same rows sorted by content, for libraries that order a block as they like."""
    keys = torch.cat([part.double().flatten(1) for part in parts], 1)
    order = sorted(range(len(keys)), key=lambda row: keys[row].tolist())
    return [part[order] for part in parts]


@lru_cache(maxsize=16)
def largest(problem: Problem) -> float:
    """Largest magnitude among the values that a step of this suite rounds."""
    most = 0.0
    for x, ids, weights in zip(problem.xs, problem.topk_ids, problem.topk_weights, strict=True):
        gain = torch.where(ids < 0, 0.0, gain_of(ids.double()))
        parts = torch.stack([gain.amax(1), (gain * weights.double().abs()).sum(1)], 1)
        parts = parts * x.double().abs().amax(1, keepdim=True)
        most = max(most, float(parts.max()) if parts.numel() else 0.0)
    return most
