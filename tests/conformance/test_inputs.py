"""Tensors as callers have them: slices, views, other types, scales beside the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefleet import EpLayout, FleetParams
from tests.conformance.comparing import check_step
from tests.conformance.context import NAN, RankContext, compute, made, received, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


def every_other_row(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_full((2 * len(t), *t.shape[1:]), 77)
    wide[::2] = t
    return wide[::2]


def part_of_wider_rows(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), 77)
    wide[..., 2:-1] = t
    return wide[..., 2:-1]


def every_other_column(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 77)
    wide[..., 1::2] = t
    return wide[..., 1::2]


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def tail_of_a_buffer(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.new_full((3,), 77), t.flatten()])[3:].view(t.shape)


def negated_twice(t: torch.Tensor) -> torch.Tensor:
    """What ``torch.view_as_real(z.conj())`` gives: the memory holds the negative numbers."""
    return torch._neg_view(-t)


WAYS = (every_other_row, part_of_wider_rows, every_other_column, transposed, tail_of_a_buffer, negated_twice)


def as_is(t: torch.Tensor) -> torch.Tensor:
    return t


def strided(ctx: RankContext, params: FleetParams, problem: Problem, which: str) -> list[Any]:
    """The same step with one of its inputs in every kind of memory."""
    fleet, got = ctx.fleet(params), []
    for way in (as_is, *WAYS):
        parts = dict(zip(("tokens", "ids", "weights"), ctx.mine(problem), strict=True))
        if which in parts:
            parts[which] = way(parts[which])
        with routed(fleet, parts["ids"], parts["weights"]) as handle:
            out = handle.dispatch(sent(parts["tokens"]))
            first, rows = received(out), compute(fleet, out)
            got.append((first, handle.combine(made(way(rows) if which == "rows" else rows)).x))
    return got


@pytest.mark.parametrize("which", ["tokens", "ids", "weights", "rows"])
def test_slices_and_views(ranks: Ranks, layout: EpLayout, which: str) -> None:
    problem = ranks.problem([5, 0, 3], topk=3, hidden=6)
    params = ranks.params(problem, layout)
    by_rank = ranks(strided, params, problem, which)
    for index in range(len(WAYS) + 1):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))
    for first, *others in by_rank:
        assert all(torch.equal(first[1], other[1]) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_rows_of_any_stride_are_rounded_alike(ranks: Ranks, layout: EpLayout, dtype: torch.dtype) -> None:
    problem = ranks.problem([9, 5], experts=8, topk=8, hidden=72, dtype=dtype, special="distinct")
    for first, *others in ranks(strided, ranks.params(problem, layout), problem, "rows", world=2):
        assert all(torch.equal(first[1], other[1]) for other in others)


def into_a_view(ctx: RankContext, params: FleetParams, problem: Problem, way: Callable[..., torch.Tensor]) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    given, got = way(torch.full_like(x, 77)), []
    for _ in range(3):
        with routed(fleet, ids, weights) as handle:
            out = handle.dispatch(sent(x))
            first = received(out)
            assert handle.combine(made(compute(fleet, out), out=given)).x is given
            got.append((first, given.clone()))
    return got


@pytest.mark.parametrize("way", WAYS)
def test_results_are_written_to_views(ranks: Ranks, layout: EpLayout, way: Callable[..., torch.Tensor]) -> None:
    problem = ranks.problem([4, 3], topk=3)
    params = ranks.params(problem, layout)
    for got in zip(*ranks(into_a_view, params, problem, way, world=2), strict=True):
        check_step(problem, params, got, ranks.transport.has("canonical_order"))


def one_row_for_all(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    many = [part[:1].expand(4, -1) for part in (x, ids, weights)]
    return step(fleet, *many), step(fleet, *(part.contiguous() for part in many))


def test_expanded_rows(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([4, 4], topk=2)
    for (_, y), (_, want) in ranks(one_row_for_all, ranks.params(problem, layout), problem, world=2):
        assert torch.equal(y, want)


SCALES = (torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float64, torch.float8_e8m0fnu)


def scales_of(problem: Problem, dtype: torch.dtype) -> list[torch.Tensor]:
    """Three scales for each token, any bits but NaN's."""
    g = torch.Generator().manual_seed(1)
    return [torch.randint(1, 120, (count, 3), generator=g).to(dtype) for count in problem.tokens]


def with_scales(
    ctx: RankContext, params: FleetParams, problem: Problem, dtype: torch.dtype, way: Callable[..., torch.Tensor]
) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    scales = way(ctx.put(scales_of(problem, dtype)[ctx.rank]))
    got = []
    for _ in range(3):
        with routed(fleet, ids, weights) as handle:
            out = handle.dispatch(sent(x, scales))
            assert out.expert_scales is not None and out.expert_scales.dtype == dtype
            assert out.expert_scales.shape == (*out.expert_tensors.shape[:-1], 3)
            first = received(out)
            got.append((first, handle.combine(made(compute(fleet, out))).x))
    return got


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_scales_travel_with_their_tokens(ranks: Ranks, layout: EpLayout, dtype: torch.dtype) -> None:
    problem = ranks.problem([4, 0, 6], topk=3)
    params = ranks.params(problem, layout, scale_bytes_per_token=3 * dtype.itemsize)
    by_rank = ranks(with_scales, params, problem, dtype, as_is)
    for index in range(3):
        got = [each[index] for each in by_rank]
        check_step(problem, params, got, ranks.transport.has("canonical_order"), scales_of(problem, dtype))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_strides_of_scales_are_read(ranks: Ranks, layout: EpLayout, way: Callable[..., torch.Tensor]) -> None:
    """Padded row strides of scales were ignored (case 22)."""
    problem = ranks.problem([4, 2], topk=3)
    params = ranks.params(problem, layout, scale_bytes_per_token=12)
    by_rank = ranks(with_scales, params, problem, torch.float32, way, world=2)
    got = [each[0] for each in by_rank]
    check_step(problem, params, got, ranks.transport.has("canonical_order"), scales_of(problem, torch.float32))


def weights_of_type(ctx: RankContext, params: FleetParams, problem: Problem) -> list[torch.Tensor]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    weights = (weights * 8).round() / 8  # exact in every type
    return [
        step(fleet, x, ids, weights.to(t))[1] for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]


def test_weights_of_any_floating_type(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([4, 3], topk=3)
    for first, *others in ranks(weights_of_type, ranks.params(problem, layout), problem, world=2):
        for other in others:
            assert torch.equal(first, other)


def with_gradients(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    with routed(fleet, ids, weights.requires_grad_()) as handle:
        out = handle.dispatch(sent(x.requires_grad_()))
        first = received(out)
        rows = compute(fleet, out).requires_grad_()
        y = handle.combine(made(rows)).x
        assert not out.expert_tensors.requires_grad and not y.requires_grad
        return first, y


def test_tensors_that_require_gradients(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([4, 3], topk=3)
    params = ranks.params(problem, layout)
    check_step(problem, params, ranks(with_gradients, params, problem, world=2), ranks.transport.has("canonical_order"))


def gone_at_once(ctx: RankContext, params: FleetParams, problem: Problem) -> list[Any]:
    """The caller's memory is overwritten and given back as soon as the sending half has returned."""
    fleet, got = ctx.fleet(params), []
    for _ in range(4):
        x, ids, weights = ctx.mine(problem)
        handle = routed(fleet, ids, weights)
        ids.fill_(0), weights.fill_(NAN)
        del ids, weights
        handle.dispatch_send_only(sent(x))
        synchronize(ctx)
        x.fill_(NAN)
        del x
        out = handle.dispatch_recv_only()
        first, rows = received(out), compute(fleet, out)
        handle.combine_send_only(made(rows))
        synchronize(ctx)
        rows.fill_(NAN)
        del rows
        got.append((first, handle.combine_recv_only().x))
    return got


def synchronize(ctx: RankContext) -> None:
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()


def test_memory_is_free_once_the_sending_half_is_done(ranks: Ranks, layout: EpLayout) -> None:
    """A host buffer was freed before it had been read (case 26)."""
    ranks.require("halves")
    problem = ranks.problem([6, 3, 5], topk=3, hidden=64)
    params = ranks.params(problem, layout)
    by_rank = ranks(gone_at_once, params, problem)
    for index in range(4):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))
