"""One rank makes a mistake: it gets an error that helps, its peers are told at once, and the next step works."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moefleet import (
    EpLayout,
    Fleet,
    FleetParams,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobSplitOperation,
    HandleAlgoKnobTopKWeights,
    HandleAlgoKnobUserStream,
    HandleParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpPeerError,
    MoEEpTimeoutError,
)
from tests.conformance.comparing import check_results, check_step
from tests.conformance.context import RankContext, compute, made, received, routed, sent, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem

M, K, H = 4, 3, 4
EXPERTS = 6


@dataclass
class Attempt:
    """One rank's part of a step: correct as it stands, each mistake changes one thing."""

    fleet: Fleet
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def run(self, **wrong: Any) -> Any:
        """A step in which ``ids``, ``weights``, ``knobs``, ``update``, ``x``, ``rows`` or ``out`` are as given."""
        knobs = [HandleAlgoKnobTopKWeights(wrong.get("weights", self.weights)), *wrong.get("knobs", ())]
        handle = self.fleet.create_handle(HandleParams(wrong.get("ids", self.ids)), wrong.get("only_knobs", knobs))
        try:
            if "update" in wrong:
                handle.update(HandleParams(wrong["update"]), wrong.get("update_knobs", ()))
            out = handle.dispatch(sent(*wrong.get("x", [self.x])))
            rows = compute(self.fleet, out)
            change = wrong.get("rows", lambda rows: [rows])
            return handle.combine(replace(made(rows, out=wrong.get("out")), x=change(rows))).x
        finally:
            handle.destroy()

    def leave(self, send_only: bool) -> None:
        """Destroy the handle in the middle of its step."""
        handle = routed(self.fleet, self.ids, self.weights)
        if send_only:
            handle.dispatch_send_only(sent(self.x))
        else:
            handle.dispatch(sent(self.x))
        handle.destroy()


def meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


MISTAKES: dict[str, tuple[Callable[[Attempt], Any], str]] = {
    "ids_float": (lambda a: a.run(ids=a.ids.float()), r"topk_ids: got dtype torch.float32, allowed torch.int32 or"),
    "ids_int16": (lambda a: a.run(ids=a.ids.short()), r"topk_ids: got dtype torch.int16"),
    "ids_flat": (lambda a: a.run(ids=a.ids[0]), r"topk_ids: got shape \[3\], allowed shape \[any, any\]"),
    "ids_elsewhere": (lambda a: a.run(ids=meta(a.ids)), r"topk_ids: got device meta"),
    "ids_no_tensor": (lambda a: a.run(ids=a.ids.tolist()), r"topk_ids: got a list, allowed a torch.Tensor"),
    "ids_too_large": (lambda a: a.run(ids=torch.full_like(a.ids, EXPERTS)), r"topk_ids: got expert id 6, .* to 5"),
    "ids_too_small": (lambda a: a.run(ids=torch.full_like(a.ids, -2)), r"topk_ids: got expert id -2, allowed -1"),
    "too_many_tokens": (
        lambda a: a.run(ids=a.ids[:1].expand(M + 1, K), weights=a.weights[:1].expand(M + 1, K)),
        r"topk_ids: got 5 tokens, allowed at most max_tokens_per_rank = 4; .* >= 5",
    ),
    "topk_too_large": (
        lambda a: a.run(ids=a.ids.repeat(1, 2), weights=a.weights.repeat(1, 2)),
        r"topk_ids: got K = 6, allowed 1 to max_topk = 4",
    ),
    "topk_zero": (lambda a: a.run(ids=a.ids[:, :0], weights=a.weights[:, :0]), r"topk_ids: got K = 0"),
    "weights_missing": (lambda a: a.run(only_knobs=[]), r"got no HandleAlgoKnobTopKWeights"),
    "weights_shape": (lambda a: a.run(weights=a.weights[:, 1:]), r"TopKWeights.weights: got shape \[3, 2\]"),
    "weights_integers": (lambda a: a.run(weights=a.weights.long()), r"TopKWeights.weights: got dtype torch.int64"),
    "weights_elsewhere": (lambda a: a.run(weights=meta(a.weights)), r"TopKWeights.weights: got device meta"),
    "knob_of_no_use": (lambda a: a.run(knobs=[HandleAlgoKnobUserStream(7)]), r"got HandleAlgoKnobUserStream"),
    "tokens_dtype": (lambda a: a.run(x=[a.x.double()]), r"x\[0\]: got dtype torch.float64"),
    "tokens_elsewhere": (lambda a: a.run(x=[meta(a.x)]), r"x\[0\]: got device meta"),
    "tokens_wide": (lambda a: a.run(x=[torch.cat([a.x, a.x], 1)]), r"x\[0\]: got shape \[3, 8\]"),
    "tokens_more": (lambda a: a.run(x=[torch.cat([a.x, a.x[:1]])]), r"got shape \[4, 4\], allowed shape \[3, 4\]"),
    "tokens_fewer": (lambda a: a.run(x=[a.x[1:]]), r"x\[0\]: got shape \[2, 4\]"),
    "tokens_no_tensor": (lambda a: a.run(x=["tokens"]), r"x\[0\]: got a str, allowed a torch.Tensor"),
    "scales_unasked": (lambda a: a.run(x=[a.x, a.x]), r"DispatchInputParams.x: got 2 tensors, allowed \[tokens\]"),
    "nothing_sent": (lambda a: a.run(x=[]), r"DispatchInputParams.x: got 0 tensors"),
    "rows_shape": (lambda a: a.run(rows=lambda r: [r[..., 1:]]), r"CombineInputParams.x\[0\]: got shape"),
    "rows_dtype": (lambda a: a.run(rows=lambda r: [r.double()]), r"CombineInputParams.x\[0\]: got dtype torch.float64"),
    "rows_elsewhere": (lambda a: a.run(rows=lambda r: [meta(r)]), r"CombineInputParams.x\[0\]: got device meta"),
    "rows_two": (lambda a: a.run(rows=lambda r: [r, r]), r"CombineInputParams.x: got 2 tensors, allowed \[rows\]"),
    "out_shape": (lambda a: a.run(out=a.x[1:].clone()), r"CombineInputParams.out: got shape \[2, 4\]"),
    "out_dtype": (lambda a: a.run(out=a.x.double()), r"CombineInputParams.out: got dtype torch.float64"),
    "update_shape": (lambda a: a.run(update=a.ids[1:]), r"update: topk_ids: got shape \[2, 3\], allowed \[3, 3\]"),
    "update_ids": (lambda a: a.run(update=torch.full_like(a.ids, EXPERTS)), r"topk_ids: got expert id 6"),
    "update_weights": (
        lambda a: a.run(update=a.ids, update_knobs=[HandleAlgoKnobTopKWeights(a.weights[1:])]),
        r"TopKWeights.weights: got shape \[2, 3\], allowed shape \[3, 3\]",
    ),
    "left_after_dispatch": (lambda a: a.leave(False), ""),
    "left_after_sending": (lambda a: a.leave(True), ""),
}
"""For each mistake a step of 3 tokens that makes it, and what its message says (empty: no error, but a step left)."""

CPU_ONLY = {"ids_too_large", "ids_too_small", "update_ids"}
"""On a GPU such a slot counts as -1, since reading the ids would stall the step."""


def attempt(ctx: RankContext, fleet: Fleet, problem: Problem, mistake: str | None) -> Any:
    """A step of this rank, or the error it ends in; left alone on purpose: None."""
    try:
        if mistake is None:
            return step(fleet, *ctx.mine(problem))
        MISTAKES[mistake][0](Attempt(fleet, *ctx.mine(problem)))
        return None
    except MoEEpError as error:
        return error


Plan = list[tuple[int, str] | None]
"""For each step which rank makes which mistake, if any."""


def follow(ctx: RankContext, params: FleetParams, problem: Problem, plan: Plan) -> list[Any]:
    fleet, got = ctx.fleet(params), []
    for wrong in plan:
        mine = wrong is not None and wrong[0] == ctx.rank
        got.append(attempt(ctx, fleet, problem, wrong[1] if mine else None))
    return got


def check_plan(ranks: Ranks, params: FleetParams, problem: Problem, plan: Plan) -> None:
    by_rank = ranks(follow, params, problem, plan)
    canonical, reasons = ranks.transport.has("canonical_order"), ranks.transport.has("peer_reasons")
    for turn, wrong in enumerate(plan):
        outcomes = [got[turn] for got in by_rank]
        if wrong is None:
            for rank, outcome in enumerate(outcomes):
                assert not isinstance(outcome, Exception), f"step {turn}, rank {rank}: {outcome!r}"
            check_step(problem, params, outcomes, canonical)
            continue
        culprit, mistake = wrong
        _, message = MISTAKES[mistake]
        for rank, outcome in enumerate(outcomes):
            where = f"step {turn}, rank {rank}, {mistake} on rank {culprit}: {outcome!r}"
            if rank != culprit:
                assert isinstance(outcome, MoEEpPeerError) and outcome.rank == culprit, where
                assert f"rank {culprit}" in str(outcome), where
                if reasons:
                    assert outcome.reason in str(outcome), where
                    assert re.search(message or "destroyed", outcome.reason), where
            elif message:
                assert isinstance(outcome, MoEEpConfigError) and re.search(message, str(outcome)), where
                assert "allowed" in str(outcome), where
            else:
                assert outcome is None, where


def possible(ranks: Ranks) -> list[str]:
    """The mistakes that can be made on this transport and device."""
    not_here = set() if ranks.device == "cpu" else CPU_ONLY
    if not ranks.transport.has("halves"):
        not_here = not_here | {"left_after_sending"}
    return [name for name in MISTAKES if name not in not_here]


@pytest.fixture
def problem(ranks: Ranks) -> Problem:
    problem = ranks.problem([3, 3, 3], experts=EXPERTS, topk=K, hidden=H, special="distinct")
    if (problem.hidden, problem.num_experts) != (H, EXPERTS):
        pytest.skip(f"{ranks.transport.name} does not carry these sizes")
    return problem


@pytest.mark.parametrize("about", dict.fromkeys(name.partition("_")[0] for name in MISTAKES))
def test_one_rank_alone(ranks: Ranks, layout: EpLayout, problem: Problem, about: str) -> None:
    """An id outside the table read out of bounds (case 8); one token too many killed the server (case 15); a dispatch
    of other rows than the handle's, or an update to another shape, was let through (case 24). Mistakes with the same
    thing are made one after the other on one Fleet."""
    ranks.require("peer_errors")
    params = ranks.params(problem, layout, max_tokens_per_rank=M, max_topk=4)
    plan: Plan = [None]
    for mistake in possible(ranks):
        if mistake.partition("_")[0] == about:
            wrong = (1, mistake)
            plan += [wrong, None, wrong, wrong, wrong, None, None]
    check_plan(ranks, params, problem, plan)


def test_mistakes_at_random(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    """Any rank, any mistake, half of the time, and every step in between is right."""
    ranks.require("peer_errors")
    names = sorted(possible(ranks))
    params = ranks.params(problem, layout, max_tokens_per_rank=M, max_topk=4)
    dice, world = random.Random(3), ranks.world
    plan: Plan = [(dice.randrange(world), dice.choice(names)) if dice.random() < 0.5 else None for _ in range(120)]
    plan.append(None)
    check_plan(ranks, params, problem, plan)


def several(ctx: RankContext, params: FleetParams, problem: Problem, culprits: list[set[int]]) -> list[Any]:
    fleet = ctx.fleet(params)
    return [attempt(ctx, fleet, problem, "ids_float" if ctx.rank in wrong else None) for wrong in culprits]


def test_several_ranks_at_once(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    ranks.require("peer_errors")
    params = ranks.params(problem, layout)
    everybody = {*range(ranks.world)}
    culprits = [everybody & wrong for wrong in ({0, 2}, set(), {0, 1, 2}, {1, 2}, set(), set())]
    by_rank = ranks(several, params, problem, culprits)
    for turn, wrong in enumerate(culprits):
        outcomes = [got[turn] for got in by_rank]
        if not wrong:
            check_step(problem, params, outcomes, ranks.transport.has("canonical_order"))
            continue
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, MoEEpConfigError if rank in wrong else MoEEpPeerError), (turn, rank, outcome)
            assert rank in wrong or outcome.rank in wrong


# What only all ranks together can get wrong.


def unlike(ctx: RankContext, params: FleetParams, problem: Problem, what: str) -> list[Any]:
    """Rank 1 brings another K, row type or scale type than the others."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    scales = [torch.ones(len(x), 1, device=x.device)] if params.scale_bytes_per_token else []
    got: list[Any] = []
    for turn in range(4):
        wrong = ctx.rank == 1 and turn in (1, 2)
        try:
            cut = ids.shape[1] - (wrong and what == "K")
            with routed(fleet, ids[:, :cut], weights[:, :cut]) as handle:
                sent_x = x.half() if wrong and what == "tokens" else x
                sent_scales = [s.view(torch.int32) if wrong and what == "scales" else s for s in scales]
                out = handle.dispatch(sent(sent_x, *sent_scales))
                rows = compute(fleet, out)
                got.append(handle.combine(made(rows.half() if wrong and what == "rows" else rows)).x)
        except MoEEpError as error:
            got.append(error)
    return got


@pytest.mark.parametrize("what", ["K", "tokens", "rows", "scales"])
def test_ranks_that_bring_unlike_things(ranks: Ranks, layout: EpLayout, what: str) -> None:
    ranks.require("peer_errors")
    problem = ranks.problem([4, 3, 2], topk=K, dtype=torch.bfloat16)
    params = ranks.params(problem, layout, scale_bytes_per_token=4 if what == "scales" else 0)
    by_rank = ranks(unlike, params, problem, what)
    told = {"K": ("K = 2", "K = 3"), "scales": ("int32 scales", "float32 scales")}.get(what, ("bfloat16", "float16"))
    for turn in (1, 2):
        for rank, got in enumerate(by_rank):
            assert isinstance(got[turn], MoEEpPeerError), (turn, rank, got[turn])
        for got in by_rank:
            assert any(part in str(got[turn]) for part in told), got[turn]
    for turn in (0, 3):
        check_results(problem, params, [got[turn] for got in by_rank])


def opposite(ctx: RankContext, params: FleetParams, problem: Problem) -> Any:
    """Rank 0 dispatches two steps before it combines the first; rank 1 combines first. Each waits for the other."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handles, outs, errors = [routed(fleet, ids, weights) for _ in range(2)], {}, []

    def call(name: str, index: int) -> None:
        try:
            if name == "dispatch":
                outs[index] = handles[index].dispatch(sent(x))
            elif index in outs:
                handles[index].combine(made(compute(fleet, outs[index])))
        except MoEEpError as error:
            errors.append(error)

    for name, index in (("dispatch", 0), ("dispatch", 1), ("combine", 0), ("combine", 1)) if ctx.rank == 0 else (
        ("dispatch", 0), ("combine", 0), ("dispatch", 1), ("combine", 1)
    ):  # fmt: skip
        call(name, index)
    return errors, step(fleet, x, ids, weights)


def test_ranks_that_wait_for_each_other(ranks: Ranks, layout: EpLayout) -> None:
    """Calls in another order on every rank: an error that names both calls, on whoever saw it first, instead of a wait
    until the time-out. Nothing of one call is read as data of the other."""
    ranks.require("crossed_calls")
    problem = ranks.problem([4, 3], topk=K)
    params = ranks.params(problem, layout)
    by_rank = ranks(opposite, params, problem, world=2, timeout_s=20.0)
    told = [str(error) for errors, _ in by_rank for error in errors]
    assert any("dispatch of step 2" in text and "combine of step 1" in text for text in told), told
    check_step(problem, params, [after for _, after in by_rank], ranks.transport.has("canonical_order"))


def one_does_not_come(ctx: RankContext, params: FleetParams, problem: Problem, wait_s: float) -> Any:
    if torch.device(ctx.device).type == "cuda":
        ctx.fleet(params)  # what a process does once on a GPU takes longer than that
    ctx.meet("all are here")
    fleet = ctx.fleet(params, timeout_s=wait_s)
    ctx.meet("built")
    if ctx.rank == ctx.world - 1:
        ctx.meet("the others gave up")
    outcome = attempt(ctx, fleet, problem, None)
    if ctx.rank != ctx.world - 1:
        ctx.meet("the others gave up")
    ctx.meet("and all know it")
    return outcome, attempt(ctx, fleet, problem, None)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    """The wait ends after BootstrapConfig.timeout_s, says for whom it was, and the step is over for the late rank."""
    ranks.require("late_ranks")
    params = ranks.params(problem, layout)
    wait_s = 1.5 if ranks.device == "cpu" else 4.0  # communicators of GPUs are made in this time, too
    by_rank, last = ranks(one_does_not_come, params, problem, wait_s), ranks.world - 1
    for error, _ in by_rank[:last]:
        assert isinstance(error, (MoEEpTimeoutError, MoEEpPeerError)), error
        assert f"rank {last}" in str(error) and f"{wait_s:g} s" in str(error), error
    assert any(isinstance(error, MoEEpTimeoutError) and error.ranks == (last,) for error, _ in by_rank[:last])
    assert isinstance(by_rank[last][0], MoEEpPeerError)
    check_step(problem, params, [after for _, after in by_rank], ranks.transport.has("canonical_order"))


# What is left of a handle after a mistake.


def again(ctx: RankContext, params: FleetParams, problem: Problem) -> list[Any]:
    """The same handle through failed steps and refused updates, on all ranks alike."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    handle, got = routed(fleet, ids, weights), []

    def whole() -> None:
        out = handle.dispatch(sent(x))
        first = received(out)
        got.append((first, handle.combine(made(compute(fleet, out))).x))

    whole()
    with pytest.raises(MoEEpConfigError):
        handle.dispatch(sent(x[1:]))
    whole()
    handle.dispatch(sent(x))
    with pytest.raises(MoEEpError):
        handle.combine(made(x.new_zeros(1)))
    whole()
    wrong_knobs = [
        [HandleAlgoKnobTopKWeights(weights[:, :1]), HandleAlgoKnobSplitOperation()],
        [HandleAlgoKnobNumReceivedTokens(10**6), HandleAlgoKnobUserStream(1)],
    ]
    for knobs in wrong_knobs:
        with pytest.raises(MoEEpConfigError):
            handle.update(HandleParams(ids), knobs)
        whole()
        handle.update(HandleParams(ids))  # with the weights that were given last and accepted
        whole()
    return got


def test_a_handle_lives_on_after_mistakes(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    """A refused update changes nothing."""
    ranks.require("peer_errors")
    params = ranks.params(problem, layout)
    by_rank = ranks(again, params, problem)
    for index in range(7):
        check_step(problem, params, [got[index] for got in by_rank], ranks.transport.has("canonical_order"))


def wrong_scales(ctx: RankContext, params: FleetParams, problem: Problem) -> list[str]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    scales = torch.ones(len(x), 3, device=x.device)
    wrong = ([x], [x, scales[:, :2]], [x, scales.half()], [x, scales[1:]], [x, scales.flatten()], [x, meta(scales)])
    told = []
    for tensors in wrong:
        with pytest.raises(MoEEpConfigError) as caught:
            routed(fleet, ids, weights).dispatch(sent(*tensors))
        told.append(str(caught.value))
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x, scales))
        handle.combine(made(compute(fleet, out)))
    return told


def test_wrong_scales(ranks: Ranks, layout: EpLayout, problem: Problem) -> None:
    ranks.require("peer_errors")
    params = ranks.params(problem, layout, scale_bytes_per_token=12)
    for told in ranks(wrong_scales, params, problem):
        for text, wanted in zip(
            told,
            (
                "got 1 tensors, allowed [tokens, scales]; scale_bytes_per_token is 12",
                "got 2 scales of torch.float32 per token, allowed scale_bytes_per_token = 12 bytes in all",
                "got 3 scales of torch.float16 per token",
                "x[1]: got shape",
                "x[1]: got shape",
                "x[1]: got device meta",
            ),
            strict=True,
        ):
            assert wanted in text


def announced_wrongly(ctx: RankContext, params: FleetParams, problem: Problem) -> list[Any]:
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    got: list[Any] = []
    for turn in range(3):
        knobs = [HandleAlgoKnobNumReceivedTokens(99)] if turn == 1 and ctx.rank == 1 else []
        try:
            got.append(Attempt(fleet, x, ids, weights).run(knobs=knobs))
        except MoEEpError as error:
            got.append(error)
    return got


def test_rows_that_were_announced_and_did_not_come(ranks: Ranks, problem: Problem) -> None:
    ranks.require("peer_errors")
    params = ranks.params(problem, EpLayout.FLAT)
    by_rank = ranks(announced_wrongly, params, problem)
    assert isinstance(by_rank[1][1], MoEEpConfigError)
    assert "HandleAlgoKnobNumReceivedTokens.target: got 99" in str(by_rank[1][1])
    for got in by_rank[:1] + by_rank[2:]:
        assert isinstance(got[1], MoEEpPeerError) and got[1].rank == 1
    for turn in (0, 2):
        check_results(problem, params, [got[turn] for got in by_rank])
