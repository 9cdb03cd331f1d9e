"""Check nvlink on real GPUs against the reference: random problems, graphs, many steps, failures.

    python benchmarks/gpu/check_nvlink.py [--world 2] [--quick | --tiny] [--only checks|random] [--random-steps 10000]

Ranks may outnumber GPUs; their kernels then take turns. Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import random_steps
from low_precision import low_precision

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpConfigError,
    MoEEpPeerError,
    MoEEpTimeoutError,
    NVLinkConfig,
    create_fleet,
    reference,
)
from tests.strategies import SPECIALS, make_problem


class Rank:
    """What one rank of the checks has at hand."""

    def __init__(self, rank, world, port):
        self.rank, self.world = rank, world
        self.begin = self.said = time.time()
        torch.set_num_threads(max(1, min(4, os.cpu_count() // world)))
        torch.cuda.set_device(rank % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        self.meetings = 0

        self.config = NVLinkConfig(programs=8 if world > torch.cuda.device_count() else None)

    def fleet(self, params, timeout_s=60.0, knobs=()):
        boot = BootstrapConfig(self.world, self.rank, tcp_store=self.store, device=self.device, timeout_s=timeout_s)
        return create_fleet(boot, params, knobs, backend=self.config)

    def meet(self):
        """A barrier over the store."""
        self.meetings += 1
        key = f"meet/{self.meetings}"
        if self.store.add(key, 1) == self.world:
            self.store.set(key + "/all", "1")
        self.store.wait([key + "/all"], timedelta(seconds=120))

    def say(self, text, every_s=0.0):
        """Print on rank 0, unless something was printed less than ``every_s`` ago."""
        if self.rank == 0 and time.time() - self.said >= every_s:
            self.said = time.time()
            print(f"[{self.said - self.begin:5.1f} s] {text}", flush=True)


def expert_rows(out, layout, first):
    """Rows as experts make them, not the identity: expert e multiplies by 1 + e/8. Rows past the counts are NaN."""
    x = out.expert_tensors
    rows = torch.full_like(x, float("nan"))
    if layout is EpLayout.EXPERT_MAJOR:
        local = torch.arange(x.shape[0], device=x.device)
        live = torch.arange(x.shape[1], device=x.device)[None, :] < out.expert_counts[:, None]
        scaled = (x.float() * (1 + (first + local) / 8)[:, None, None]).to(x.dtype)
    else:
        ids, weights = out.recv_topk_idx, out.recv_topk_weights
        live = (ids >= 0).any(-1)
        factor = torch.where(ids >= 0, weights * (1 + (first + ids) / 8), 0.0).sum(-1, keepdim=True)
        scaled = (x.float() * factor).to(x.dtype)
    return torch.where(live[..., None], scaled, rows)


def step(handle, x, layout, first, out=None):
    got = handle.dispatch(DispatchInputParams([x]))
    return got, handle.combine(CombineInputParams([expert_rows(got, layout, first)], out=out)).x


def check_dispatch(got, want, what):
    for name in ("expert_counts", "recv_total_counter", "recv_topk_idx", "recv_topk_weights"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None), (what, name)
        assert mine is None or torch.equal(mine.cpu(), theirs), (what, name, mine, theirs)
    live = ~want.expert_tensors.isnan().any(-1)
    assert torch.equal(got.expert_tensors.cpu()[live], want.expert_tensors[live]), (what, "rows")


def random_problems(me, layout, quick, tiny):
    shapes = [(64, 16, 8, torch.bfloat16), (7168, 32, 8, torch.bfloat16), (33, 5, 3, torch.float32),
              (100, 1, 2, torch.float16), (9000, 7, 4, torch.bfloat16)]  # fmt: skip
    number = 0
    for hidden, experts, topk, dtype in shapes[: 1 if tiny else 2 if quick else 5]:
        params, fleet, first = None, None, 0
        for special in SPECIALS[:: 3 if tiny else 1]:
            number += 1
            rng = random.Random(number)
            tokens = [rng.choice((0, 1, 3, 17, 40)) for _ in range(me.world)]
            p = make_problem(number, me.world, experts, hidden, topk, tokens, dtype, special)
            if fleet is None:
                params = p.params(layout, max_tokens_per_rank=40)
                fleet = me.fleet(params)
                first = fleet.placement.first_slot(me.rank)
            ids, weights = p.topk_ids[me.rank].to(me.device), p.topk_weights[me.rank].to(me.device)
            x = p.xs[me.rank].to(me.device)
            with fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) as handle:
                got, y = step(handle, x, layout, first)
            me.say(f"  {layout.name} H {hidden} {special}", every_s=5)
            want = reference.dispatch(p.xs, *p.routing, params, fill=float("nan"))
            check_dispatch(got, want[me.rank], (layout.name, special, number))
            rows = [expert_rows(w, layout, fleet.placement.first_slot(r)) for r, w in enumerate(want)]
            expected = reference.combine(rows, *p.routing, params)[me.rank]
            largest = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0) * 4
            worst = float((y.cpu().float() - expected.float()).abs().max()) if expected.numel() else 0.0
            assert worst <= reference.tolerance(dtype, me.world, topk, largest), (layout.name, special, worst, largest)
        fleet.destroy()
    return number


def graphs(me, layout, rounds):
    """Two captured sizes and an eager one, replayed at random, all inputs rewritten between replays."""
    hidden, experts, topk, dtype = 256, 24, 4, torch.bfloat16
    sizes = [(5, 64, 33)[(me.rank + i) % 3] for i in range(3)]  # different on the ranks of one step
    base = make_problem(0, me.world, experts, hidden, topk, [64] * me.world, dtype)
    fleet = me.fleet(base.params(layout))
    first = fleet.placement.first_slot(me.rank)
    lanes = []
    for i, tokens in enumerate(sizes):
        x = torch.zeros(tokens, hidden, device=me.device, dtype=dtype)
        ids = torch.zeros(tokens, topk, device=me.device, dtype=(torch.int64, torch.int32)[i % 2])
        weights = torch.zeros(tokens, topk, device=me.device)
        handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
        y = torch.zeros_like(x)
        lanes.append((x, ids, weights, handle, y))

    def forward(lane):
        x, ids, _, handle, y = lane
        handle.update(HandleParams(ids))
        step(handle, x, layout, first, out=y)

    for lane in lanes:
        forward(lane)
    torch.cuda.synchronize()
    captured = []
    for lane in lanes[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(lane)
            if lane is lanes[1]:
                forward(lane)  # an even number of steps in one graph, an odd one in the other
        captured.append(graph)
    me.meet()
    rng, gen = random.Random(5), torch.Generator(device=me.device)
    for number in range(rounds):
        which = rng.randrange(3)
        x, ids, weights, _, y = lanes[which]
        gen.manual_seed(1000 * number + me.rank)
        x.copy_(torch.randn(x.shape, device=me.device, generator=gen))
        ids.copy_(torch.randint(-1, experts, ids.shape, device=me.device, generator=gen))
        weights.copy_(torch.rand(weights.shape, device=me.device, generator=gen))
        if which < 2:
            captured[which].replay()
        else:
            forward(lanes[which])
        first_y = y.clone()
        forward(lanes[which])
        assert torch.equal(first_y, y), (layout.name, number, which, float((first_y.float() - y.float()).abs().max()))
        me.say(f"  {layout.name} graphs, round {number}", every_s=5)
        if number % 10 == 0:
            idle = torch.zeros(1, device=me.device)
            idle.copy_(torch.tensor([float(me.rank)]))
            if rng.random() < 0.5 and me.rank == 0:
                time.sleep(0.005)
    torch.cuda.synchronize()
    stats = fleet.stats()
    for lane in lanes:
        lane[3].destroy()
    fleet.destroy()
    return stats


def halves(me, layout, rounds):
    """Two steps open at once, their halves interleaved; bits equal those of whole steps."""
    p = make_problem(3, me.world, 12, 128, 3, [9] * me.world, torch.float32, "random")
    fleet = me.fleet(p.params(layout))
    first = fleet.placement.first_slot(me.rank)
    ids, weights, x = (t[me.rank].to(me.device) for t in (p.topk_ids, p.topk_weights, p.xs))
    a, b = (fleet.create_handle(HandleParams(i), [HandleAlgoKnobTopKWeights(weights)]) for i in (ids, ids.flip(0)))
    wide = torch.zeros(9, 256, device=me.device)
    wide[:, ::2] = x
    want = [step(h, x, layout, first)[1] for h in (a, b)]
    for _ in range(rounds):
        a.dispatch_send_only(DispatchInputParams([wide[:, ::2]]))
        b.dispatch_send_only(DispatchInputParams([x]))
        got_a, got_b = a.dispatch_recv_only(), b.dispatch_recv_only()
        a.combine_send_only(CombineInputParams([expert_rows(got_a, layout, first)]))
        y_a = a.combine_recv_only().x
        b.combine_send_only(CombineInputParams([expert_rows(got_b, layout, first)]))
        y_b = b.combine_recv_only().x
        assert torch.equal(y_a, want[0]) and torch.equal(y_b, want[1]), (layout.name, "halves")
    fleet.destroy()


def failures(me, layout):
    """One rank brings too much: it is told at once, its peers at their next look and why, and the next step works."""
    p = make_problem(4, me.world, 8, 64, 2, [6] * me.world, torch.float32, "distinct")
    fleet = me.fleet(p.params(layout))
    first = fleet.placement.first_slot(me.rank)
    ids, weights, x = (t[me.rank].to(me.device) for t in (p.topk_ids, p.topk_weights, p.xs))
    handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
    _, want = step(handle, x, layout, first)
    for number in range(4):
        fleet.checking = number % 2 == 1  # as with MOEFLEET_CHECK=1: peers raise in the step itself
        if me.rank == me.world - 1:
            try:
                handle.dispatch(DispatchInputParams([x.repeat(3, 1)]))
                raise AssertionError("nothing raised")
            except MoEEpConfigError:
                pass
        else:
            try:
                step(handle, x, layout, first)
                torch.cuda.synchronize()
                fleet.require_alive()
                raise AssertionError("the peers were not told")
            except MoEEpPeerError as error:
                assert error.rank == me.world - 1 and "DispatchInputParams.x[0]" in error.reason, error
        me.meet()
        assert torch.equal(step(handle, x, layout, first)[1], want), (layout.name, "after a failed step")
        if number > 1:  # left in the middle
            with fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) as other:
                try:
                    if me.rank == 0:
                        other.dispatch(DispatchInputParams([x]))
                    else:
                        step(other, x, layout, first)
                        torch.cuda.synchronize()
                        fleet.require_alive()
                        raise AssertionError("the peers were not told")
                except MoEEpPeerError as error:
                    assert error.rank == 0 and "its handle was destroyed" in error.reason, error
            me.meet()
            assert torch.equal(step(handle, x, layout, first)[1], want), (layout.name, "after a step that was left")
    fleet.checking = False
    before = fleet.stats()["bad_ids"]
    wild = ids.clone()
    wild[0, 0], wild[1, 1] = 8, -2
    handle.update(HandleParams(wild))
    y = step(handle, x, layout, first)[1]
    handle.update(HandleParams(torch.where((wild < 0) | (wild > 7), -1, wild)))
    assert torch.equal(y, step(handle, x, layout, first)[1]), (layout.name, "out-of-range ids")
    assert fleet.stats()["bad_ids"] == before + 2
    fleet.destroy()


def silence(me):
    """A rank that does not come: the others get an error that names it, in time."""
    p = make_problem(4, me.world, 8, 64, 2, [6] * me.world, torch.float32, "distinct")
    fleet = me.fleet(p.params(EpLayout.RANK_MAJOR), timeout_s=3.0)
    ids, weights, x = (t[me.rank].to(me.device) for t in (p.topk_ids, p.topk_weights, p.xs))
    handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
    step(handle, x, EpLayout.RANK_MAJOR, fleet.placement.first_slot(me.rank))
    torch.cuda.synchronize()
    me.meet()
    if me.rank != me.world - 1:
        begin = time.time()
        try:
            step(handle, x, EpLayout.RANK_MAJOR, fleet.placement.first_slot(me.rank))
            torch.cuda.synchronize()
            fleet.require_alive()
            raise AssertionError("no time-out")
        except MoEEpTimeoutError as error:
            assert error.ranks == (me.world - 1,) and time.time() - begin < 6, (error, time.time() - begin)
            me.say(f"time-out after {time.time() - begin:.2f} s of 3: {error}")
    me.meet()
    fleet.destroy()


def departure(me):
    """A rank that destroys its Fleet: the others hear of it at once, not after the time-out."""
    p = make_problem(4, me.world, 8, 64, 2, [6] * me.world, torch.float32, "distinct")
    fleet = me.fleet(p.params(EpLayout.FLAT))
    ids, weights, x = (t[me.rank].to(me.device) for t in (p.topk_ids, p.topk_weights, p.xs))
    first = fleet.placement.first_slot(me.rank)
    handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
    step(handle, x, EpLayout.FLAT, first)
    if me.rank == 0:
        fleet.destroy()
    else:
        begin = time.time()
        try:
            step(handle, x, EpLayout.FLAT, first)
            torch.cuda.synchronize()
            fleet.require_alive()
            raise AssertionError("the peers were not told")
        except MoEEpPeerError as error:
            assert error.rank == 0 and "destroyed" in str(error) and time.time() - begin < 20, error
    me.meet()
    fleet.destroy()


def body(rank, world, port, a):
    faulthandler.dump_traceback_later(a.stuck_after, exit=True)
    me = Rank(rank, world, port)
    me.say(f"{world} ranks on {torch.cuda.device_count()} GPUs")
    if a.only in ("", "checks"):
        checks(me, a.quick, a.tiny)
    if a.only in ("", "random") and a.random_steps:
        random_steps.run(me, a.random_steps)
    me.say(f"all checks passed, world {world}")
    me.meet()


def checks(me, quick, tiny):
    world = me.world
    for layout in EpLayout:
        begin = time.time()
        number = random_problems(me, layout, quick, tiny)
        me.say(f"{layout.name}: {number} random problems ok ({time.time() - begin:.1f} s)")
        begin = time.time()
        stats = graphs(me, layout, 8 if tiny else 60 if quick else 300)
        me.say(f"{layout.name}: graphs and eager steps at random ok, {stats} ({time.time() - begin:.1f} s)")
        halves(me, layout, 3 if tiny else 20)
        if world > 1:
            failures(me, layout)
        me.say(f"{layout.name}: halves, failures ok")
        begin = time.time()
        low_precision(me, layout, quick, tiny)
        me.say(f"{layout.name}: fp8 rows, scales and quantisation in flight ok ({time.time() - begin:.1f} s)")
    if world > 1:
        departure(me)
        silence(me)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="where ranks share GPUs, whose kernels then take turns")
    parser.add_argument("--only", default="", choices=("checks", "random"))
    parser.add_argument("--random-steps", type=int, default=2000)
    parser.add_argument("--stuck-after", type=float, default=580, help="seconds until every rank shows where it is")
    a = parser.parse_args()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(body, (a.world, port, a), nprocs=a.world)
