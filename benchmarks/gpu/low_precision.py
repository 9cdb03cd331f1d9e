"""Rows that travel as fp8, on real GPUs: bits as torch makes them, in every layout, eager and from graphs.

Reference and comparison are on the CPU. Experts are the identity kernel, which decodes rows, and grouped GEMM.
"""

from __future__ import annotations

import random

import torch

from moefleet import (
    CombineInputParams,
    DispatchInputParams,
    FleetAlgoKnobQuantization,
    GroupedGemmConfig,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    IdentityConfig,
    MoEWeightPack,
    quant,
    reference,
)
from moefleet.kernels import get_kernel
from tests.strategies import make_problem

KNOBS = [FleetAlgoKnobQuantization(frozenset({"FP8E4M3"}))]
SHAPES = [(256, 16, 4, torch.bfloat16), (7168, 32, 8, torch.bfloat16), (33, 5, 3, torch.float32),
          (200, 1, 2, torch.float16), (9000, 7, 4, torch.bfloat16)]  # fmt: skip


def bits(x):
    """fp8 numbers can be compared as bytes only."""
    return x.contiguous().view(torch.uint8).cpu()


def check_rows(got, want, what):
    """Rows that exist and their scales, bit for bit; what else dispatch says."""
    for name in ("expert_counts", "recv_total_counter", "recv_topk_idx", "recv_topk_weights"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None), (what, name)
        assert mine is None or torch.equal(mine.cpu(), theirs), (what, name, mine, theirs)
    assert got.expert_tensors.dtype == want.expert_tensors.dtype, what
    assert got.expert_scales.dtype == want.expert_scales.dtype and got.row_dtype == want.row_dtype, what
    live = ~want.expert_tensors.float().isnan().any(-1)  # rows past the counts are NaN
    for name in ("expert_tensors", "expert_scales"):
        mine, theirs = bits(getattr(got, name))[live], bits(getattr(want, name))[live]
        assert torch.equal(mine, theirs), (what, name, int((mine != theirs).sum()), "bytes differ")


def check_home(y, rows, problem, params, rank, what):
    expected = reference.combine(rows, *problem.routing, params)[rank]
    if expected.numel():
        largest = 4 * max(1.0, float(expected.abs().max()))
        worst = float((y.cpu().float() - expected.float()).abs().max())
        allowed = reference.tolerance(expected.dtype, problem.world_size, problem.topk, largest)
        assert worst <= allowed, (what, worst, allowed)


def step(handle, fleet, given, out=None):
    kernel = get_kernel(IdentityConfig())
    got = handle.dispatch(DispatchInputParams(given))
    rows = kernel.compute(got, fleet.params.resolved_layout, None)
    return got, handle.combine(CombineInputParams([rows], out=out)).x


def routed(me, fleet, problem):
    ids, weights = problem.topk_ids[me.rank].to(me.device), problem.topk_weights[me.rank].to(me.device)
    return fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])


def problems(me, layout, shapes):
    """Tokens that the sender encodes: in numbers of all sizes, by the GPU's own conversion and without it."""
    for number, (hidden, experts, topk, dtype) in enumerate(shapes):
        rng = random.Random(number)
        tokens = [rng.choice((0, 1, 17, 40)) for _ in range(me.world)]
        p = make_problem(number, me.world, experts, hidden, topk, tokens, dtype)
        for x in p.xs:
            x *= 10.0 ** torch.linspace(-6, 2, x.numel()).view(x.shape).flip(-1)
        params = p.params(layout, max_tokens_per_rank=40)
        want = reference.dispatch(p.xs, *p.routing, params, quantised=True, fill=float("nan"))
        rows = [reference.compute(each, lambda x, index: x, fill=float("nan")) for each in want]
        fleet = me.fleet(params, knobs=KNOBS)
        here, there = quant.encode(p.xs[me.rank]), quant.encode(p.xs[me.rank].to(me.device))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(here, there)), (hidden, dtype, "torch on CPU and GPU")
        for native in (True, False):
            fleet.engine._native = fleet.engine._native and native
            fleet.engine._bound.clear()  # kernels that were bound for a slot
            x = p.xs[me.rank].to(me.device)
            with routed(me, fleet, p) as handle:
                for given in (x, x.repeat_interleave(2, 1)[:, ::2]):
                    what = (layout.name, hidden, dtype, native)
                    got, y = step(handle, fleet, [given])
                    check_rows(got, want[me.rank], what)
                    check_home(y, rows, p, params, me.rank, what)
        fleet.destroy()


def scales(me, layout):
    """Scales that come with their rows: fp8 rows, and other types, from padded memory."""
    p = make_problem(1, me.world, 6, 300, 3, [9] * me.world, torch.bfloat16)
    low, low_scales = zip(*map(quant.encode, p.xs))
    cases = [(low, list(low_scales), 1)]
    for dtype in (torch.float32, torch.int32, torch.uint8, torch.float64):
        cases.append((p.xs, [(torch.arange(9 * 5).view(9, 5) % 120).to(dtype) for _ in p.xs], 2))
    for xs, given, width in cases:
        scale_bytes = given[0].shape[1] * given[0].itemsize
        params = p.params(layout, dtype_bytes=width, scale_bytes_per_token=scale_bytes)
        want = reference.dispatch(xs, *p.routing, params, scales=given, fill=float("nan"))
        fleet = me.fleet(params)
        x, mine = xs[me.rank].to(me.device), given[me.rank].to(me.device)
        for padded in (mine, torch.cat([mine.repeat_interleave(2, 1), mine], 1)[:, : 2 * mine.shape[1] : 2]):
            with routed(me, fleet, p) as handle:
                got = handle.dispatch(DispatchInputParams([x, padded]))
                check_rows(got, want[me.rank], (layout.name, "scales", mine.dtype))
                rows = torch.ones_like(got.expert_tensors, dtype=got.row_dtype)
                handle.combine(CombineInputParams([rows]))
        fleet.destroy()


def graphs(me, layout, rounds):
    """A captured forward with gated experts, whose inputs are rewritten between replays, against the same eager; the
    last also against the reference."""
    hidden, experts, topk, inter = 512, 12, 4, 64
    tokens = [(33, 5, 64)[rank % 3] for rank in range(me.world)]
    p = make_problem(2, me.world, experts, hidden, topk, tokens, torch.bfloat16)
    fleet = me.fleet(p.params(layout), knobs=KNOBS)
    w13, w2 = p.weights(inter)
    held = list(fleet.placement.experts_of(me.rank))
    weights = MoEWeightPack(w13[held].to(me.device), w2[held].to(me.device))
    kernel = get_kernel(GroupedGemmConfig())
    x, ids, share = (part[me.rank].to(me.device) for part in (p.xs, p.topk_ids, p.topk_weights))
    handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(share)])
    y = torch.zeros_like(x)

    def forward():
        handle.update(HandleParams(ids))
        got = handle.dispatch(DispatchInputParams([x]))
        rows = kernel.compute(got, fleet.params.resolved_layout, weights)  # waits for nothing, or capture would fail
        handle.combine(CombineInputParams([rows], out=y))

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    me.meet()
    for number in range(rounds):
        p = make_problem(100 + number, me.world, experts, hidden, topk, tokens, torch.bfloat16)
        for there, new in ((x, p.xs), (ids, p.topk_ids), (share, p.topk_weights)):
            there.copy_(new[me.rank])
        graph.replay()
        replayed = y.clone()
        forward()
        assert torch.equal(replayed, y), (layout.name, number, "a replay differs from an eager step")
    want = reference.forward(p.xs, *p.routing, w13, w2, quantised=True)[me.rank]
    worst, allowed = float((y.cpu().double() - want).abs().max()), 2.0**-5 * max(1.0, float(want.abs().max()))
    assert worst <= allowed, (layout.name, "gated experts", worst, allowed)
    handle.destroy()
    fleet.destroy()


def low_precision(me, layout, quick, tiny):
    """All of it in one layout."""
    problems(me, layout, SHAPES[: 1 if tiny else 3 if quick else 5])
    scales(me, layout)
    graphs(me, layout, 3 if tiny else 20)
