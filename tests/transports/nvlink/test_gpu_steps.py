"""On real GPUs: captured forwards, streams, what a Fleet counts, and knobs of a handle."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import prometheus_client
import pytest
import torch

from moefleet import (
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    Fleet,
    FleetParams,
    GroupedGemmConfig,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobTopKWeights,
    HandleAlgoKnobUserStream,
    HandleParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpLayer,
    MoEEpPeerError,
    MoEEpTensors,
    NVLinkConfig,
    SplitConfig,
    UnquantizedMoEWeights,
    create_fleet,
    probe,
    reference,
)
from moefleet.integrations import prometheus
from moefleet.substrate.symmetric import SymmetricMemory
from tests.conformance.context import RankContext, compute, made, poison, routed, sent, step
from tests.conformance.pool import shared_pool
from tests.conformance.ranks import Ranks
from tests.conformance.transports import Transport
from tests.strategies import LAYOUTS, Problem, make_problem

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())
worlds = pytest.mark.parametrize("world", [1, 2])  # ranks may share a GPU
SIZES = (0, 1, 7, 32)
E, K, H, I = 6, 2, 64, 32  # noqa: E741 - the legend's letters


def ranks() -> Ranks:
    return Ranks(shared_pool(), Transport("nvlink", probe("nvlink")), "cuda", set())


def problem_of(seed: int, tokens: list[int]) -> Problem:
    return make_problem(seed, len(tokens), E, H, K, tokens, torch.bfloat16)


def params_of(layout: EpLayout) -> FleetParams:
    return problem_of(0, [max(SIZES)]).params(layout)


def layer_of(ctx: RankContext, params: FleetParams, fleet: Fleet | None = None) -> MoEEpLayer:
    w13, w2 = problem_of(0, [1]).weights(I)
    local = range(ctx.rank * E // ctx.world, (ctx.rank + 1) * E // ctx.world)
    mine = UnquantizedMoEWeights(ctx.put(w13[local.start : local.stop]), ctx.put(w2[local.start : local.stop]))
    backend = SplitConfig(NVLinkConfig(), GroupedGemmConfig())
    layer = MoEEpLayer(ctx.bootstrap, params, mine, backend=backend, fleet=fleet)
    layer.fleet.checking = False  # as in production: nothing waits
    ctx.fleets.append(layer.fleet)
    return layer


def tensors_of(ctx: RankContext, seed: int, tokens: int) -> MoEEpTensors:
    return MoEEpTensors(*ctx.mine(problem_of(seed, [tokens] * ctx.world)))


def captured(ctx: RankContext, params: FleetParams) -> list[float]:
    """Every rank goes its own way through sizes, captured and eager; a second, eager step says what is right."""
    layer = layer_of(ctx, params)
    forwards = {}
    for tokens in SIZES:  # all ranks capture at once, each another size
        mine = SIZES[(SIZES.index(tokens) + ctx.rank) % len(SIZES)]
        forwards[mine] = layer.capture(tensors_of(ctx, 0, mine))
    wrong = []
    for number in range(60):
        tokens = SIZES[(number * 7 + ctx.rank * number) % len(SIZES)]
        given = tensors_of(ctx, number, tokens)
        eager = (number + ctx.rank) % 3 == 0
        y = (layer(given) if eager else forwards[tokens](given)).clone()
        want = layer(given)
        wrong.append(float((y.float() - want.float()).abs().max()) if tokens else 0.0)
    assert layer.fleet.stats()["steps"] == 60 * 2 + 3 * len(SIZES)
    return wrong


@worlds
@layouts
def test_captured_sizes_replayed_in_any_order(layout: EpLayout, world: int) -> None:
    for wrong in ranks()(captured, params_of(layout), world=world):
        assert not any(wrong), wrong


def owners(ctx: RankContext, params: FleetParams) -> list[str]:
    """What a captured forward refuses."""
    layer, told = layer_of(ctx, params), []
    forward, given = layer.capture(tensors_of(ctx, 0, 7)), tensors_of(ctx, 1, 7)
    want = layer(given)

    def refused(call: Any) -> None:
        with pytest.raises(MoEEpError) as caught:
            call()
        told.append(str(caught.value))

    handle = routed(layer.fleet, given.topk_ids, given.topk_weights)
    out = handle.dispatch(sent(given.hidden_states))
    refused(forward.replay)
    handle.combine(CombineInputParams([out.expert_tensors]))
    handle.destroy()
    if GPUS > 1:
        with torch.cuda.device((ctx.device.index + 1) % GPUS):
            refused(forward.replay)
    graph, fresh = torch.cuda.CUDAGraph(), replace(given, topk_ids=given.topk_ids[:, :1].int().contiguous())
    with torch.cuda.graph(graph):
        refused(lambda: routed(layer.fleet, fresh.topk_ids, given.topk_weights[:, :1]))
    assert torch.equal(forward(given), want)
    shared = layer_of(ctx, params, layer.fleet)
    again = shared.capture(given)
    assert torch.equal(again.replay(), want)
    layer.destroy()
    refused(forward.replay)
    refused(again.replay)
    return told


@worlds
def test_what_a_captured_forward_refuses(world: int) -> None:
    wanted = ["no open step", "replay on the device of the capture", "run the same step once before the capture"]
    wanted = [text for text in wanted if GPUS > 1 or "device" not in text]
    for told in ranks()(owners, params_of(EpLayout.EXPERT_MAJOR), world=world):
        for text, want in zip(told, [*wanted, "its layer was destroyed", "was destroyed"], strict=True):
            assert want in text, text


def failing_beside_graphs(ctx: RankContext, params: FleetParams) -> list[Any]:
    """Rank 1 gives up a step that rank 0 runs eagerly, and one that it replays; no host knows the number of either."""
    layer, given = layer_of(ctx, params), tensors_of(ctx, 0, 7)
    forward = layer.capture(given)
    want, told = forward.replay().clone(), []
    for replayed in (False, True):
        forward.replay()
        with pytest.raises(MoEEpError) as caught:
            if ctx.rank == 1:
                layer(replace(given, hidden_states=given.hidden_states[1:]))
            (forward if replayed else layer)(given)
            torch.cuda.synchronize()
            layer.fleet.require_alive()
        told.append((type(caught.value), getattr(caught.value, "rank", -1), getattr(caught.value, "reason", "")))
        assert torch.equal(forward(given), want)
    return told


@layouts
def test_reasons_beside_graphs(layout: EpLayout) -> None:
    theirs, own = ranks()(failing_beside_graphs, params_of(layout), world=2)
    assert [kind for kind, _, _ in own] == [MoEEpConfigError] * 2
    for kind, rank, reason in theirs:
        assert (kind, rank) == (MoEEpPeerError, 1)
        assert f"DispatchInputParams.x[0]: got shape [6, {H}]" in reason


def failing_to_share(ctx: RankContext, params: FleetParams, part: str) -> list[Any]:
    """Rank 1 fails, also where rank 0 waits for it in a library; both try again at once."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory left")

    with pytest.MonkeyPatch.context() as patch, pytest.raises((RuntimeError, MoEEpError)) as caught:
        if ctx.rank == 1:
            patch.setattr(SymmetricMemory, part, fail)
        ctx.fleet(params)
    _, y = step(ctx.fleet(params), *ctx.mine(problem_of(0, [7, 7])))
    return [type(caught.value), getattr(caught.value, "reason", ""), y]


@pytest.mark.parametrize("part", ["allocate", "map"])
def test_a_rank_that_cannot_share_memory(part: str) -> None:
    (kind, reason, y), (own, _, _) = ranks()(failing_to_share, params_of(EpLayout.FLAT), part, world=2)
    assert (kind, reason, own) == (MoEEpPeerError, "RuntimeError: no memory left", RuntimeError)
    assert y.isfinite().all()


def counted(ctx: RankContext, params: FleetParams, problems: list[Problem]) -> list[dict[str, Any]]:
    """Stats after a few steps, after a bad id, from another thread during a capture, and after destroy."""
    fleet = ctx.fleet(params)
    for problem in problems:
        step(fleet, *ctx.mine(problem))
    got = [fleet.stats()]
    registry = prometheus_client.CollectorRegistry()
    with prometheus.export(fleet, registry):
        text = prometheus_client.generate_latest(registry).decode()
    assert f'moefleet_steps_total{{rank="{ctx.rank}"}} {float(len(problems))}' in text, text
    assert "moefleet_expert_rows_total" in text and "moefleet_wait_seconds_total" in text
    x, ids, weights = ctx.mine(problems[-1])
    ids[0, 0] = E
    with pytest.raises(MoEEpConfigError, match="1 ids out of range"):
        step(fleet, x, ids, weights)
    got.append(fleet.stats())
    fleet.checking = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread = threading.Thread(target=lambda: got.append(fleet.stats()))
        thread.start(), thread.join()
        torch.zeros(1, device=ctx.device)
    fleet.destroy()
    return [*got, fleet.stats()]


@worlds
@layouts
def test_what_a_fleet_counts(layout: EpLayout, world: int) -> None:
    problems = [problem_of(seed, [4 + seed, 2][:world]) for seed in range(5)]
    params = problems[0].params(layout, max_tokens_per_rank=10)
    by_rank = ranks()(counted, params, problems, world=world)
    outs = [reference.dispatch(p.xs, *p.routing, params) for p in problems]
    first = [0, *(E * (rank + 1) // world for rank in range(world))]
    crossed = torch.zeros(world, world, dtype=torch.int64)  # from, to
    for p in problems:
        for source, ids in enumerate(p.topk_ids):
            for rank in range(world):
                crossed[source, rank] += int(((ids >= first[rank]) & (ids < first[rank + 1])).any(1).sum())
    for rank, (stats, after_bad, from_thread, last) in enumerate(by_rank):
        assert stats["steps"] == 5 and stats["failed_steps"] == 0 and stats["bad_ids"] == 0
        assert stats["tokens"] == sum(p.tokens[rank] for p in problems)
        assert stats["rows_sent"] == crossed[rank].tolist() and stats["rows_received"] == crossed[:, rank].tolist()
        assert stats["tokens_per_expert"] == _expert_rows(layout, outs, rank, first)
        row = H * 2
        both = [(there + back) * row for there, back in zip(stats["rows_received"], stats["rows_sent"], strict=True)]
        assert stats["bytes_received"] == stats["bytes_sent"] == both
        assert stats["waited_s"][rank] == 0 and all(0 <= s < 60 for s in stats["waited_s"])
        assert all(s > 0 for peer, s in enumerate(stats["waited_s"]) if peer != rank)
        assert after_bad["bad_ids"] == 1, "raised, and still counted"
        assert from_thread["steps"] == after_bad["steps"] and last["bad_ids"] == 1
        assert last["steps"] == from_thread["steps"] and last["rows_sent"] == from_thread["rows_sent"]


def _expert_rows(layout: EpLayout, outs: Any, rank: int, first: list[int]) -> list[int]:
    total = torch.zeros(first[rank + 1] - first[rank], dtype=torch.int64)
    for by_rank in outs:
        out = by_rank[rank]
        if layout is EpLayout.EXPERT_MAJOR:
            total += out.expert_counts
        else:
            ids = out.recv_topk_idx
            total += torch.bincount(ids[ids >= 0], minlength=len(total))
    return total.tolist()


def uncounted(ctx: RankContext, params: FleetParams, problem: Problem) -> dict[str, Any]:
    fleet = create_fleet(ctx.bootstrap, params, backend=NVLinkConfig(count=False))
    ctx.fleets.append(fleet)
    step(fleet, *ctx.mine(problem))
    return fleet.stats()


def test_a_fleet_that_does_not_count() -> None:
    problem = problem_of(0, [4])
    (stats,) = ranks()(uncounted, problem.params(), problem, world=1)
    assert stats["steps"] == 1 and stats["bad_ids"] == 0
    for name in ("tokens", "tokens_per_expert", "rows_received", "rows_sent", "waited_s"):
        assert stats[name] is None


def knobs(ctx: RankContext, params: FleetParams, problem: Problem, rows: list[int]) -> list[Any]:
    """Announced rows: right, then wrong on all ranks, then right again; and a stream of the caller's."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    got: list[Any] = []
    for more in (0, 1, 0):
        handle = routed(fleet, ids, weights, HandleAlgoKnobNumReceivedTokens(rows[ctx.rank] + more))
        try:
            out = handle.dispatch(sent(x))
            told = out.get_num_tokens()
            rows_made = compute(fleet, out)
            poison(out)
            got.append((told, handle.combine(made(rows_made)).x))
        except MoEEpError as error:
            got.append(error)
        finally:
            handle.destroy()
    with pytest.raises(MoEEpConfigError, match=r"HandleAlgoKnobUserStream.*torch\.cuda\.stream") as refused:
        routed(fleet, ids, weights, HandleAlgoKnobUserStream(7))
    got.append(str(refused.value))
    return got


@worlds
def test_knobs_of_a_handle(world: int) -> None:
    problem = problem_of(3, [5, 9][:world])
    params = problem.params(EpLayout.FLAT)
    rows = [int(out.recv_total_counter) for out in reference.dispatch(problem.xs, *problem.routing, params)]
    for rank, (first, wrong, last, _) in enumerate(ranks()(knobs, params, problem, rows, world=world)):
        assert first[0] == last[0] == rows[rank] and torch.equal(first[1], last[1])
        assert isinstance(wrong, MoEEpError), wrong
        if isinstance(wrong, MoEEpConfigError):
            assert f"got {rows[rank] + 1}, allowed the {rows[rank]} that arrived" in str(wrong)


def over_streams(ctx: RankContext, params: FleetParams, problem: Problem) -> bool:
    """Steps of one Fleet on streams in turn, the default one too, without a word between them, stay in order."""
    fleet, (x, ids, weights) = ctx.fleet(params), ctx.mine(problem)
    fleet.checking = False
    streams = [torch.cuda.default_stream(ctx.device), *(torch.cuda.Stream(ctx.device) for _ in range(2))]
    handle, ys = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]), []

    def whole_step() -> torch.Tensor:
        return handle.combine(made(reference_rows(fleet, handle.dispatch(DispatchInputParams([x]))))).x

    want = whole_step()
    torch.cuda.synchronize()
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            ys.append(whole_step())
    torch.cuda.synchronize()
    return all(torch.equal(y, want) for y in ys)


def reference_rows(fleet: Fleet, out: Any) -> torch.Tensor:
    """This suite's experts, without a look at the counts: rows past them are computed and never read."""
    experts = torch.tensor(list(fleet.placement.experts_of(fleet.bootstrap.rank)), device=out.expert_tensors.device)
    gains = (1 + experts % 8) / 4
    if out.recv_topk_idx is None:
        return (out.expert_tensors.float() * gains[:, None, None]).to(out.expert_tensors.dtype)
    factor = torch.where(out.recv_topk_idx >= 0, out.recv_topk_weights * gains[out.recv_topk_idx.clamp(min=0)], 0.0)
    return (out.expert_tensors.float() * factor.sum(-1, keepdim=True)).to(out.expert_tensors.dtype)


@worlds
@layouts
def test_steps_on_streams_in_turn(layout: EpLayout, world: int) -> None:
    problem = problem_of(3, [5, 9][:world])
    assert all(ranks()(over_streams, problem.params(layout), problem, world=world))


def beside_a_stream(ctx: RankContext, params: FleetParams) -> list[bool]:
    """A layer whose Fleet has a stream reads what the current stream writes late, and is read by it at once."""
    plain, fresh = layer_of(ctx, params), [tensors_of(ctx, seed, 7) for seed in range(3)]
    want = [plain(tensors).clone() for tensors in fresh]
    stream = torch.cuda.Stream(ctx.device)
    layer = layer_of(replace(ctx, bootstrap=replace(ctx.bootstrap, stream=stream.cuda_stream)), params)
    given = tensors_of(ctx, 0, 7)
    forward, right = layer.capture(given), []
    graph, kept = torch.cuda.CUDAGraph(), replace(given, output=torch.empty_like(given.hidden_states))
    layer(kept)
    with torch.cuda.graph(graph):  # the caller's own capture: all of it is there
        layer(kept)
    for number in range(24):
        given.hidden_states.fill_(float("nan")), given.topk_weights.fill_(float("nan"))
        torch.cuda._sleep(2_000_000)  # about a millisecond
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            getattr(given, name).copy_(getattr(fresh[number % 3], name))
        if number % 4 == 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
            y = kept.output
        else:
            y = forward(given) if number % 4 == 1 else layer(given)
        right.append(torch.equal(y.clone(), want[number % 3]))
        del y
    return right


@worlds
@layouts
def test_a_layer_beside_a_stream(layout: EpLayout, world: int) -> None:
    for right in ranks()(beside_a_stream, params_of(layout), world=world):
        assert all(right), right
