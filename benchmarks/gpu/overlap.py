"""How much time overlap hides, and what the number of nvlink's programs costs a GEMM beside it.

    torchrun --nproc-per-node 2 benchmarks/gpu/overlap.py [--cases em128,ht4096] [--programs 16,32,...] [--json FILE]

A step is update, dispatch and combine, and a shared expert: two dense products of DeepSeek-V3's size (H 7168, I 2048)
on this rank's own tokens. Schedules, each from a CUDA graph of eight steps with eight routings, and eager:

    comm      the step without the shared expert        gemm      the shared expert alone
    serial    one after the other
    halves    one stream: send, up projection, receive; send, down projection, receive
    streams   the step on a stream of its own beside the shared expert

"hidden" is the part of the shorter of comm and gemm that serial minus the schedule saves. All alternate in one run; the
slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial

import torch
import torch.distributed as dist

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    NVLinkConfig,
    create_fleet,
)
from moefleet.bench.cases import ROUTINGS, CommCase
from moefleet.bench.gpu import enter
from moefleet.bench.gpu_timing import alternating_us, capture, eager_us

HIDDEN, SHARED, EXPERTS, TOPK = 7168, 2048, 256, 8
CASES = {
    "em128": (EpLayout.EXPERT_MAJOR, 128),
    "rm128": (EpLayout.RANK_MAJOR, 128),
    "ht4096": (EpLayout.FLAT, 4096),
}
PROGRAMS = "16,32,64,132,264"


class SharedExpert:
    """A gated expert that every token visits: ``up`` then ``down``."""

    def __init__(self, tokens):
        def weight(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[0] ** 0.5

        self.w13, self.w2 = weight(HIDDEN, 2 * SHARED), weight(SHARED, HIDDEN)
        self.h = torch.empty(tokens, 2 * SHARED, device="cuda", dtype=torch.bfloat16)
        self.y = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def up(self, x):
        torch.mm(x, self.w13, out=self.h)

    def down(self):
        gate, up = self.h.chunk(2, -1)
        torch.mm(torch.nn.functional.silu(gate) * up, self.w2, out=self.y)


class Schedules:
    """One Fleet and its ways to run a step; ``number`` says with which routing."""

    def __init__(self, case, pool, x, shared, side, programs):
        boot = BootstrapConfig(
            case.world, dist.get_rank(), process_group=dist.group.WORLD, device=x.device, timeout_s=60
        )
        self.fleet = create_fleet(boot, case.params, backend=NVLinkConfig(programs=programs))
        self.pool = [(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) for ids, weights in pool]
        self.handle = self.fleet.create_handle(*self.pool[0])
        self.x, self.y, self.sent, self.shared, self.side = (
            x,
            torch.empty_like(x),
            DispatchInputParams([x]),
            shared,
            side,
        )

    def comm(self, number=0):
        self.handle.update(*self.pool[number])
        out = self.handle.dispatch(self.sent)
        self.handle.combine(CombineInputParams([out.expert_tensors], out=self.y))

    def gemm(self, number=0):
        self.shared.up(self.x)
        self.shared.down()

    def serial(self, number=0):
        self.comm(number)
        self.gemm()

    def halves(self, number=0):
        self.handle.update(*self.pool[number])
        self.handle.dispatch_send_only(self.sent)
        self.shared.up(self.x)
        out = self.handle.dispatch_recv_only()
        self.handle.combine_send_only(CombineInputParams([out.expert_tensors], out=self.y))
        self.shared.down()
        self.handle.combine_recv_only()

    def streams(self, number=0):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.comm(number)
        self.gemm()
        main.wait_stream(self.side)

    def close(self):
        self.handle.destroy()
        self.fleet.destroy()


def run(name, programs, eager):
    layout, tokens = CASES[name]
    world, rank = dist.get_world_size(), dist.get_rank()
    case = CommCase(world, tokens, HIDDEN, EXPERTS, TOPK, layout=layout, dtype=torch.bfloat16)
    pool = [(ids.cuda(), weights.cuda()) for ids, weights in (case.routed(rank, n) for n in range(ROUTINGS))]
    x, shared, side = case.x(rank).cuda(), SharedExpert(tokens), torch.cuda.Stream()
    ways = {}
    fleets = {count: Schedules(case, pool, x, shared, side, count) for count in (None, *programs)}
    for count, each in fleets.items():
        for way in ("comm", "serial", "streams", *(("gemm", "halves") if count is None else ())):
            ways[way, count] = getattr(each, way)
    graphs = {}
    for key, way in ways.items():
        try:
            graphs[key] = capture([partial(way, n) for n in range(ROUTINGS)])
        except RuntimeError as error:  # the same on all ranks
            print(f"{name}: {key[0]} cannot be captured: {error}", flush=True)
            torch.cuda.synchronize()
    replays = 4 if tokens > 1000 else 20
    measured = {"graph": alternating_us(graphs, ROUTINGS, replays=replays)}
    if eager:
        measured["eager"] = eager_us(ways, rounds=3, runs=1 if tokens > 1000 else 2)
    lines = [line for kind, us in measured.items() for line in table(name, kind, us, fleets)]
    graphs.clear()
    for each in fleets.values():
        each.close()
    torch.cuda.empty_cache()
    return lines


def table(name, kind, us, fleets):
    lines, gemm = [], us["gemm", None]
    for count, each in fleets.items():
        comm, serial = us["comm", count], us["serial", count]
        line = {"case": name, "how": kind, "programs": each.fleet.engine.dispatch_grid.programs}
        line |= {"default": count is None, "comm": comm, "gemm": gemm, "serial": serial}
        for way in ("halves", "streams"):
            if (way, count) in us:
                line[way] = us[way, count]
                line[f"{way}_hidden"] = (serial - us[way, count]) / min(comm, gemm)
        lines.append({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
        if dist.get_rank() == 0:
            shown = "".join(
                f"  {way} {line[way]:7.1f} ({line[f'{way}_hidden']:4.0%} hidden)" if way in line else " " * 31
                for way in ("halves", "streams")
            )
            mark = "*" if count is None else " "
            print(
                f"{name:7} {kind:5} {line['programs']:4}{mark} programs  comm {comm:7.1f}  gemm {gemm:7.1f}"
                f"  serial {serial:7.1f}{shown}",
                flush=True,
            )
    return lines


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", default="em128,ht4096", help=", ".join(CASES))
    p.add_argument("--programs", default=PROGRAMS, help="beside the default, which is marked with *")
    p.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--json")
    a = p.parse_args()
    enter(BootstrapConfig.from_env(), 120)
    programs = [int(count) for count in a.programs.split(",") if count]
    lines = [line for name in a.cases.split(",") for line in run(name, programs, a.eager)]
    if a.json and dist.get_rank() == 0:
        with open(a.json, "w") as f:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": lines}, f, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main()
