"""Sizes: what was declared always fits, and what does not fit is refused with both numbers."""

from __future__ import annotations

import pytest
import torch

from moefleet import EpLayout, FleetParams, MoEEpConfigError, MoEEpError, MoEEpPeerError
from tests.conformance.comparing import check_step
from tests.conformance.context import RankContext, Received, made, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


def steps(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[tuple[Received, torch.Tensor]]:
    fleet = ctx.fleet(params)
    return [step(fleet, *ctx.mine(problem)) for problem in problems]


def run(ranks: Ranks, params: FleetParams, problems: list[Problem]) -> None:
    by_rank = ranks(steps, params, problems, world=problems[0].world_size)
    for index, problem in enumerate(problems):
        check_step(problem, params, [each[index] for each in by_rank], ranks.transport.has("canonical_order"))


def test_sizes_come_from_what_was_declared(ranks: Ranks, layout: EpLayout) -> None:
    """Buffers sized from the first batch trapped on a larger one (case 16)."""
    problems = [ranks.problem(tokens, seed=seed) for seed, tokens in enumerate([(1, 0, 1), (32, 32, 32), (2, 32, 0)])]
    run(ranks, ranks.params(problems[1], layout, max_topk=8), problems)


@pytest.mark.parametrize("world, experts", [(2, 12), (4, 4), (3, 7), (4, 2), (4, 1), (1, 3)])
def test_every_token_to_every_expert(ranks: Ranks, layout: EpLayout, world: int, experts: int) -> None:
    """Receive buffers were sized with the local experts, or without K (case 17), experts had to divide by ranks
    (case 21), and a full house overflowed (case 18). Here ranks hold 0 to 6 experts, and all of it is used."""
    ranks.require_ranks(world)
    topk = min(8, experts)
    problems = [
        ranks.problem([8] * world, seed=1, experts=experts, topk=topk, special="distinct"),
        ranks.problem([8] * world, seed=2, experts=experts, topk=topk, special="one_expert"),
        ranks.problem([8] * world, seed=3, experts=experts, topk=topk, special="duplicates"),
    ]
    run(ranks, ranks.params(problems[0], layout), problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [1, 5, 100, 2048])
def test_hidden_sizes(ranks: Ranks, layout: EpLayout, hidden: int, dtype: torch.dtype) -> None:
    """A hidden size outside a fixed list aborted the process (case 19)."""
    if ranks.hidden(hidden) != hidden:
        pytest.skip(f"{ranks.transport.name} carries no rows of {hidden}; the next size is {ranks.hidden(hidden)}")
    problem = ranks.problem([3, 7], hidden=hidden, dtype=dtype, topk=4)
    run(ranks, ranks.params(problem, layout), [problem])


def refused(ctx: RankContext, params: FleetParams) -> MoEEpError:
    with pytest.raises(MoEEpError) as caught:
        ctx.fleet(params)
    return caught.value


def test_a_hidden_size_outside_the_limits_is_refused_with_the_way_out(ranks: Ranks, layout: EpLayout) -> None:
    """Refused at construction, in words (case 19)."""
    limits = ranks.transport.limits
    wrong = 0
    if limits is not None and limits.max_hidden is not None:
        wrong = limits.max_hidden + limits.hidden_multiple
    elif limits is not None and (limits.hidden_sizes is not None or limits.hidden_multiple > 1):
        wrong = max(limits.hidden_sizes or [limits.hidden_multiple]) + 1
    if not wrong:
        pytest.skip(f"{ranks.transport.name} carries rows of any size")
    problem = ranks.problem([1, 1])
    params = problem.params(layout, token_hidden_size=wrong)
    for error in ranks(refused, params, world=2):
        assert isinstance(error, MoEEpConfigError)
        assert "token_hidden_size" in str(error) and f"got {wrong}" in str(error)


def overflow(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[object]:
    fleet, out = ctx.fleet(params), []
    for problem in problems:
        try:
            out.append(step(fleet, *ctx.mine(problem)))
        except MoEEpError as error:
            out.append(error)
    return out


def test_more_rows_than_declared(ranks: Ranks) -> None:
    """With max_recv_tokens_per_rank an overflow is an error with both numbers, never a trap, and the next step works;
    what just fits does (case 18). One rank gets all rows, 6 or 9 by the number of ranks; 5 are declared."""
    ranks.require("peer_errors")
    fits = ranks.problem([2, 1, 2], special="one_rank", seed=1)
    too_many = ranks.problem([3, 3, 3], special="one_rank", seed=2)
    params = ranks.params(too_many, EpLayout.FLAT, max_recv_tokens_per_rank=5)
    by_rank = ranks(overflow, params, [fits, too_many, too_many, fits, fits])
    canonical, arrived = ranks.transport.has("canonical_order"), f"{sum(too_many.tokens)} rows"
    for index in (0, 3, 4):
        check_step(fits, params, [got[index] for got in by_rank], canonical)
    for index in (1, 2):
        mine, *others = [got[index] for got in by_rank]
        assert isinstance(mine, MoEEpConfigError)
        assert "max_recv_tokens_per_rank" in str(mine) and arrived in str(mine) and "at most 5" in str(mine)
        for other in others:
            assert isinstance(other, MoEEpPeerError) and other.rank == 0
            assert arrived in other.reason or not ranks.transport.has("peer_reasons")


def far_row(ctx: RankContext, params: FleetParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fleet, last = ctx.fleet(params), params.num_experts - 1
    x = torch.arange(3 * params.token_hidden_size, device=ctx.device).reshape(3, -1).remainder(251).bfloat16()
    ids = torch.tensor([[last, 0], [-1, last], [last - 1, -1]], device=ctx.device)
    with routed(fleet, ids, torch.ones(3, 2, device=ctx.device)) as handle:
        out = handle.dispatch(sent(x))
        y = handle.combine(made(out.expert_tensors)).x
        return out.expert_tensors[last, :2].clone(), y, x


def test_offsets_beyond_32_bits(ranks: Ranks) -> None:
    """32-bit offsets overflowed past 2**31 elements (case 20). Memory of 4.3 GB is reserved twice, and 5 rows of it
    are touched."""
    params = FleetParams(520, 1024, 4096, max_topk=2)
    assert params.num_experts * params.max_tokens_per_rank * params.token_hidden_size > 2**31
    ranks.require_fit(params, 1)
    ((rows, y, x),) = ranks(far_row, params, world=1)
    assert torch.equal(rows, x[:2])
    assert torch.equal(y, torch.stack([2 * x[0], x[1], x[2]]))
