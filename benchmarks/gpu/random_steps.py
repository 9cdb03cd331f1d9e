"""Thousands of random steps on real GPUs, every output compared, from a few sizes so that kernels compile once.

Each rank draws its own number of tokens (0 too) and its own way for each step: an eager step, one in halves, or the
replay of a graph. Experts multiply by factors of their own, so a rank knows its result from its inputs alone; it is
computed in float64 for a whole batch of steps at once, on the GPU.
"""

from __future__ import annotations

import random
import time

import torch

from moefleet import (
    CombineInputParams,
    DispatchInputParams,
    EpAlgorithm,
    EpLayout,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    reference,
)

TOKENS = (0, 1, 7, 33, 64)
EXPERTS, TOPK, HIDDEN, BATCH = 20, 4, 512, 128
CONFIGS = [(layout, dtype) for dtype in (torch.bfloat16, torch.float32) for layout in EpLayout]
WAYS = ("eager", "halves", "graph", "graph")


def gain(ids):
    """What expert ``ids`` multiplies by; 0 for none."""
    return torch.where(ids >= 0, 1 + ids / 8, 0.0)


class Experts:
    """This rank's experts. Rows past the counts become NaN."""

    def __init__(self, fleet):
        rank, self.layout = fleet.bootstrap.rank, fleet.params.layout
        self.first = fleet.placement.first_slot(rank)
        local = torch.arange(fleet.placement.num_local(rank), device=fleet.device)
        self.gains = gain(self.first + local)[:, None, None]

    def __call__(self, out):
        x = out.expert_tensors
        if self.layout is EpLayout.EXPERT_MAJOR:
            live = torch.arange(x.shape[1], device=x.device)[None, :] < out.expert_counts[:, None]
            made = x.float() * self.gains
        else:
            ids = out.recv_topk_idx
            live = (ids >= 0).any(-1)
            made = (
                x.float()
                * (out.recv_topk_weights * gain(torch.where(ids < 0, -1, ids + self.first))).sum(-1)[..., None]
            )
        return torch.where(live[..., None], made.to(x.dtype), float("nan"))


class Lane:
    """Steps of one number of tokens: a handle, the memory that its graph reads and writes, and the graph."""

    def __init__(self, fleet, experts, tokens, dtype):
        self.fleet, self.experts = fleet, experts
        self.x = torch.zeros(tokens, HIDDEN, device=fleet.device, dtype=dtype)
        self.ids = torch.full((tokens, TOPK), -1, device=fleet.device)
        self.weights = torch.zeros(tokens, TOPK, device=fleet.device)
        self.y = torch.zeros_like(self.x)
        self.handle = fleet.create_handle(HandleParams(self.ids), [HandleAlgoKnobTopKWeights(self.weights)])
        self.graph = torch.cuda.CUDAGraph()

    def eager(self, x, ids, weights, y):
        self.handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
        out = self.handle.dispatch(DispatchInputParams([x]))
        self.handle.combine(CombineInputParams([self.experts(out)], out=y))

    def halves(self, x, ids, weights, y):
        self.handle.update(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
        self.handle.dispatch_send_only(DispatchInputParams([x]))
        out = self.handle.dispatch_recv_only()
        self.handle.combine_send_only(CombineInputParams([self.experts(out)], out=y))
        self.handle.combine_recv_only()

    def capture(self):
        with torch.cuda.graph(self.graph):
            self.eager(self.x, self.ids, self.weights, self.y)

    def replay(self, x, ids, weights, y):
        self.x.copy_(x), self.ids.copy_(ids), self.weights.copy_(weights)
        self.graph.replay()
        y.copy_(self.y)


def run(me, steps):
    """``steps`` of them over all configurations. Raises AssertionError at the first wrong output."""
    each = -(-steps // len(CONFIGS))
    for number, (layout, dtype) in enumerate(CONFIGS):
        begin = time.time()
        worst = run_config(me, number, layout, dtype, each)
        what = f"{layout.name} {str(dtype)[6:]}: {each} random steps ok"
        me.say(f"{what}, largest error {worst:.2f} of what is allowed ({time.time() - begin:.1f} s)")


def run_config(me, number, layout, dtype, steps):
    high = layout is EpLayout.FLAT
    params = FleetParams(
        EXPERTS, max(TOKENS), HIDDEN, dtype.itemsize, layout=layout, max_topk=TOPK,
        algorithm=EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY,
    )  # fmt: skip
    fleet = me.fleet(params)
    experts = Experts(fleet)
    lanes = {tokens: Lane(fleet, experts, tokens, dtype) for tokens in TOKENS}
    for way in ("eager", "halves"):
        for lane in lanes.values():
            getattr(lane, way)(lane.x, lane.ids, lane.weights, lane.y)
    torch.cuda.synchronize()
    for lane in lanes.values():
        lane.capture()
    me.meet()
    dice = random.Random(1000 * number + me.rank)
    source = torch.Generator(device=me.device).manual_seed(1000 * number + me.rank)
    worst, largest_step = 0.0, fleet.stats()["steps"]
    for begin in range(0, steps, BATCH):
        worst = max(worst, run_batch(me, lanes, dtype, min(BATCH, steps - begin), dice, source))
        me.say(f"  {layout.name} {str(dtype)[6:]}: {begin + BATCH} steps", every_s=5)
    counted = fleet.stats()["steps"] - largest_step
    assert counted == steps, f"{layout.name}: {counted} steps were counted, {steps} were made"
    for lane in lanes.values():
        lane.handle.destroy()
        del lane.graph
    fleet.destroy()
    return worst


def run_batch(me, lanes, dtype, count, dice, source):
    shape, like = (count, max(TOKENS)), {"device": me.device, "generator": source}
    x = torch.randn(*shape, HIDDEN, **like).to(dtype)
    ids = torch.randint(-1, EXPERTS, (*shape, TOPK), **like)
    again = torch.rand(*shape, **like) < 0.2  # these name their first expert twice
    ids[..., 1] = torch.where(again, ids[..., 0], ids[..., 1])
    weights = torch.rand(*shape, TOPK, **like)
    y = torch.full_like(x, float("nan"))
    drawn = [(dice.choice(TOKENS), dice.choice(WAYS)) for _ in range(count)]
    for step, (tokens, way) in enumerate(drawn):
        part = (tensor[step, :tokens] for tensor in (x, ids, weights, y))
        lane = lanes[tokens]
        (lane.replay if way == "graph" else getattr(lane, way))(*part)
        if dice.random() < 0.002:
            time.sleep(0.002)
    factors = gain(ids.double())
    want = x.double() * (weights * factors).sum(-1, keepdim=True)
    largest = (x.abs().amax(-1).double() * torch.maximum(factors.amax(-1), (weights * factors).sum(-1))).amax(-1)
    allowed = reference.tolerance(dtype, me.world, TOPK, 1.0) * largest.clamp(min=1e-6)
    taken = torch.tensor([tokens for tokens, _ in drawn], device=me.device)
    live = torch.arange(max(TOKENS), device=me.device)[None, :] < taken[:, None]
    off = torch.where(live, (y.double() - want).abs().nan_to_num(float("inf")).amax(-1), 0.0).amax(-1) / allowed
    worst = float(off.max())
    if not worst <= 1:
        at = int(off.argmax())
        raise AssertionError(
            f"rank {me.rank}, step {at} of the batch, {drawn[at]}: off by {worst:.3g} of what is allowed"
        )
    return worst
