"""Time nvlink against NCCL-EP: update + dispatch + combine, from CUDA graphs of ten steps with ten routings.

    torchrun --nproc-per-node 2 benchmarks/gpu/bench_nvlink.py [--cases em128,...] [--json FILE] [--grids P:S:W:R,...]

All candidates alternate in one run; a number is the slowest rank's median. ``--grids`` measures launch shapes
(programs, senders, warps, register bound) side by side. NCCL-EP is left out where ``nccl.ep`` is not importable.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from functools import partial

import torch
import torch.distributed as dist

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpAlgorithm,
    EpLayout,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    create_fleet,
)
from moefleet.bench.gpu_timing import alternating_us, capture, eager_us, routing
from moefleet.transports.nvlink.engine import Grids

EXPERTS, TOPK, HIDDEN, POOL = 256, 8, 7168, 10
CASES = {
    "em128": (EpLayout.EXPERT_MAJOR, 128, 0.0, 0.40),
    "em128zipf": (EpLayout.EXPERT_MAJOR, 128, 1.0, 0.55),
    "rm128": (EpLayout.RANK_MAJOR, 128, 0.0, 0.50),
    "em1": (EpLayout.EXPERT_MAJOR, 1, 0.0, 0.60),
    "rm1": (EpLayout.RANK_MAJOR, 1, 0.0, 0.60),
    "ht4096": (EpLayout.FLAT, 4096, 0.0, 0.60),
    "ht128": (EpLayout.FLAT, 128, 0.0, 0.35),
}
"""Layout, tokens of each rank, Zipf exponent, and the ratio to NCCL-EP that we want."""


class Ours:
    """One Fleet and handle; the experts' rows are what was received, as in the measurements of NCCL-EP."""

    def __init__(self, layout, pool, x, grids=None):
        high = layout is EpLayout.FLAT
        params = FleetParams(
            EXPERTS, max(len(x), 128), HIDDEN, layout=layout, max_topk=TOPK,
            algorithm=EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY,
        )  # fmt: skip
        boot = BootstrapConfig(
            dist.get_world_size(), dist.get_rank(), process_group=dist.group.WORLD, device=x.device, timeout_s=20
        )
        self.fleet = create_fleet(boot, params, backend="nvlink")
        if grids is not None:
            self.fleet.engine.dispatch_grid = self.fleet.engine.combine_grid = Grids(*grids[:4])
            if len(grids) > 4:
                self.fleet.engine._early = bool(grids[4])
        self.pool = [(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) for ids, weights in pool]
        self.x, self.y = DispatchInputParams([x]), torch.empty_like(x)
        self.handle = self.fleet.create_handle(*self.pool[0])

    def step(self, number=0):
        self.handle.update(*self.pool[number])
        out = self.handle.dispatch(self.x)
        self.handle.combine(CombineInputParams([out.expert_tensors], out=self.y, out_is_stable=True))

    def update(self, number=0):
        self.handle.update(*self.pool[number])

    def exchange(self, number=0):
        out = self.handle.dispatch(self.x)
        self.handle.combine(CombineInputParams([out.expert_tensors], out=self.y, out_is_stable=True))

    def destroy(self):
        self.handle.destroy()
        self.fleet.destroy()


def crossing_bytes(pool):
    """Mean bytes of rows that a rank sends to others in dispatch, each token once to each rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    owner = pool[0][0].new_tensor(range(EXPERTS)) * world // EXPERTS
    rows = sum((owner[ids] == r).any(-1).sum() for ids, _ in pool for r in range(world) if r != rank)
    return int(rows) / len(pool) * HIDDEN * 2


def run(name, grids, parts):
    layout, tokens, skew, goal = CASES[name]
    pool = [routing(tokens, EXPERTS, TOPK, 1000 * dist.get_rank() + i, skew) for i in range(POOL)]
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ours = {"nvlink" + (f" {g}" if g else ""): Ours(layout, pool, x, g) for g in grids}
    candidates = dict(ours)
    if importlib.util.find_spec("nccl") is not None:
        from moefleet.bench.gpu_peers import NcclEp

        candidates["nccl_ep"] = NcclEp(layout, pool, x, EXPERTS)
    graphs = {n: capture([partial(c.step, i) for i in range(POOL)]) for n, c in candidates.items()}
    if parts:
        for n, c in ours.items():
            graphs[n + " update"] = capture([partial(c.update, i) for i in range(POOL)])
            graphs[n + " rest"] = capture([partial(c.exchange, i) for i in range(POOL)])
    graph_us = alternating_us(graphs, POOL, replays=5 if tokens > 1000 else 20)
    eager = eager_us({n: c.step for n, c in candidates.items()}, rounds=2)
    peer = graph_us.get("nccl_ep", float("nan"))
    lines = []
    for n, us in graph_us.items():
        ratio, sent = us / peer, crossing_bytes(pool)
        lines.append({"case": name, "candidate": n, "graph_us": round(us, 1), "ratio": round(ratio, 3), "goal": goal,
                      "eager_us": round(eager.get(n, float("nan")), 1)})  # fmt: skip
        if dist.get_rank() == 0:
            times = f"graph {us:7.1f} us  ratio {ratio:5.2f} (want {goal})  eager {eager.get(n, 0):7.1f}"
            times += f"  {2 * sent / us / 1e3:5.0f} GB/s"
            print(f"{name:10} {n:32} {times}", flush=True)
    del graphs
    for c in candidates.values():
        c.destroy()
    torch.cuda.empty_cache()
    return lines


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", default=",".join(CASES))
    p.add_argument(
        "--grids",
        default="",
        help="P:S:W:R[:E], several with commas: launch shapes beside the default; E: early launch, 0 or 1",
    )
    p.add_argument("--parts", action="store_true", help="time update and the rest apart too")
    p.add_argument("--link", action="store_true", help="measure what the link carries, too")
    p.add_argument("--json")
    a = p.parse_args()
    local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    grids = [None, *(tuple(map(int, g.split(":"))) for g in a.grids.split(",") if g)]
    if a.link and dist.get_world_size() > 1:
        from push import push_gbps

        link = push_gbps()
        if dist.get_rank() == 0:
            print(f"push bandwidth {link:.0f} GB/s in each direction", flush=True)
    lines = [line for name in a.cases.split(",") for line in run(name, grids, a.parts)]
    if a.json and dist.get_rank() == 0:
        with open(a.json, "w") as f:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": lines}, f, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
