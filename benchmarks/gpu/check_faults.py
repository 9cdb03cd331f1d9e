"""Check nvlink's fault tolerance on real GPUs: processes that are killed, stopped, readmitted and replaced.

    PYTHONPATH=src python benchmarks/gpu/check_faults.py [--only two|four|cost] [--limit 170]

Two ranks on two GPUs, four ranks on the same two, and what the knob costs a step that nothing happens to. Each part
prints what it does; a table comes last. Nothing waits for longer than ``--limit`` seconds in all, after which every
process shows where it is and is killed. Exits with 1 if anything failed.

A part of two or four ranks, all layouts, eager steps and graphs that were captured before anything happened:

1. SIGSTOP of the last rank: accused after ``timeout_ms``, degraded steps equal the reference without it; SIGCONT:
   evicted, readmitted, and all outputs have the bits that they had before.
2. SIGKILL of the last rank while the others wait for it in an eager step: time to the flag and to the end of the step;
   reconcile, degraded steps.
3. A new process takes its place (update_topology): full strength, new graphs.
4. SIGKILL of that one while the others wait for it in the replay of a graph.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing as mp
import os
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from check_nvlink import expert_rows

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpRankEvictedError,
    NVLinkConfig,
    create_fleet,
    reference,
)
from tests.strategies import make_problem

HIDDEN, EXPERTS, TOPK, TOKENS = 512, 16, 4, 24
PROBLEMS = 3
SILENCE_MS = 1000
WAIT_S = 160


class Rank:
    """One process: its store, its device, and its Fleets, one for each layout."""

    def __init__(self, rank, world, port, limit, capture):
        faulthandler.dump_traceback_later(limit, exit=True)
        self.rank, self.world, self.begin = rank, world, time.time()
        torch.set_num_threads(2)
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.config = NVLinkConfig(programs=8 if world > gpus else None)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.bootstrap = BootstrapConfig(world, rank, tcp_store=self.store, device=self.device, timeout_s=WAIT_S)
        self.capture, self.marks = capture, {}

    def build(self):
        knob = FleetAlgoKnobFaultTolerance(timeout_ms=SILENCE_MS, reconcile_timeout_s=20.0, coordinator_takeover_s=3.0)
        self.lanes = [Lane(self, layout, knob) for layout in EpLayout]
        self.say(f"{self.world} ranks on {torch.cuda.device_count()} GPUs, Fleets built")

    def meet(self, name, count=None):
        if self.store.add(f"meet/{name}", 1) == (count or self.world):
            self.store.set(f"met/{name}", "")
        self.store.wait([f"met/{name}"], timedelta(seconds=WAIT_S))

    def tell(self, name, value=""):
        self.store.set(f"told/{name}", str(value))

    def told(self, name):
        self.store.wait([f"told/{name}"], timedelta(seconds=WAIT_S))
        return self.store.get(f"told/{name}").decode()

    def say(self, text):
        if self.rank == 0:
            print(f"[{time.time() - self.begin:5.1f} s] {text}", flush=True)

    def mark(self, name, value):
        """A line of the table, from rank 0."""
        self.marks[name] = value
        self.say(f"{name}: {value}")


class Lane:
    """A Fleet of one layout with a handle, static inputs and a graph of one step."""

    def __init__(self, me, layout, knob):
        self.me, self.layout = me, layout
        self.problems = [
            make_problem(
                number, me.world, EXPERTS, HIDDEN, TOPK, [TOKENS - 2 * r for r in range(me.world)], torch.bfloat16
            )
            for number in range(PROBLEMS)
        ]
        self.params = self.problems[0].params(layout)
        self.fleet = create_fleet(me.bootstrap, self.params, [knob], backend=me.config)
        self.start()

    def start(self):
        """Static tensors, and a handle of the present ranks."""
        p, rank, device = self.problems[0], self.me.rank, self.me.device
        self.first = self.fleet.placement.first_slot(rank)
        self.x, self.ids, self.weights = (t[rank].to(device) for t in (p.xs, p.topk_ids, p.topk_weights))
        self.y = torch.zeros_like(self.x)
        self.handle = self.fleet.create_handle(HandleParams(self.ids), [HandleAlgoKnobTopKWeights(self.weights)])

    def step(self):
        self.handle.update(HandleParams(self.ids))
        got = self.handle.dispatch(DispatchInputParams([self.x]))
        rows = expert_rows(got, self.layout, self.first)
        self.handle.combine(CombineInputParams([rows], out=self.y))

    def record(self):
        """Capture a step that every rank captures as well."""
        self.replay = self.me.capture(self.step)

    def run(self, number, replayed):
        """The step with the inputs of problem ``number``, without a wait."""
        p, rank = self.problems[number % PROBLEMS], self.me.rank
        for static, fresh in ((self.x, p.xs), (self.ids, p.topk_ids), (self.weights, p.topk_weights)):
            static.copy_(fresh[rank])
        self.y.fill_(float("nan"))
        (self.replay if replayed else self.step)()

    def outputs(self):
        """Bits of all problems, eager and replayed."""
        found = []
        for number in range(PROBLEMS):
            for replayed in (False, True):
                self.run(number, replayed)
                torch.cuda.synchronize()
                assert not self.fleet.query_fault(), (self.layout, number, replayed, self.fleet.faults)
                found.append(self.y.clone())
        return found

    def check(self, mask, what):
        """All problems, eager and replayed, against the reference under ``mask``."""
        assert self.fleet.query_active_mask().tolist() == mask, (self.fleet.query_active_mask(), mask)
        for number, y in enumerate(self.outputs()):
            p = self.problems[number // 2]
            want = reference.dispatch(p.xs, *p.routing, self.params, mask=mask, fill=float("nan"))
            firsts = [self.fleet.placement.first_slot(r) for r in range(self.me.world)]
            rows = [None if w is None else expert_rows(w, self.layout, f) for w, f in zip(want, firsts)]
            expected = reference.combine(rows, *p.routing, self.params, mask=mask)[self.me.rank].float()
            worst = float((y.cpu().float() - expected).abs().max())
            allowed = reference.tolerance(
                torch.bfloat16, self.me.world, TOPK, 4 * max(1.0, float(expected.abs().max()))
            )
            assert worst <= allowed, (self.layout.name, what, number, worst, allowed)

    def until_flagged(self, replayed, victim, act=None):
        """Begin a step that waits for the victim, ``act`` a little later, and see when the host learns of it and when
        the step ends. Milliseconds of both since ``act``, or since the beginning."""
        self.run(0, replayed)
        if act is not None:
            time.sleep(0.05)
            assert not self.fleet.query_fault()
            act()
        begin = time.perf_counter()
        while not self.fleet.query_fault():
            assert time.perf_counter() - begin < 30, "no flag"
        flagged = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        assert self.fleet.faults.accused >> victim & 1, self.fleet.faults
        assert self.y.isfinite().all(), "the faulted step's output"
        return (flagged - begin) * 1e3, (done - begin) * 1e3

    def reconcile(self, mask, **options):
        begin = time.perf_counter()
        got = self.fleet.reconcile_active_mask(**options).tolist()
        assert got == mask, (got, mask)
        assert self.fleet.clear_faults().tolist() == mask
        return (time.perf_counter() - begin) * 1e3


def captured(step):
    """Captures a step into a CUDA graph. Returns its replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def victim_waits(me, name):
    """The victim's part: say who it is, and wait for whatever comes."""
    me.tell(f"{name}/pid", os.getpid())
    return me.told(f"{name}/go on")


def faults(me, newcomer):
    victim, last = me.world - 1, me.rank == me.world - 1
    without, full = [1] * victim + [0], [1] * me.world
    if not newcomer:
        me.build()
        for lane in me.lanes:
            lane.step()
            torch.cuda.synchronize()
            me.meet(f"warm/{lane.layout.name}")
            lane.record()
            lane.check(full, "healthy")
        healthy = [lane.outputs() for lane in me.lanes]
        me.say("healthy steps and graphs equal the reference")
        stop_and_readmit(me, healthy, victim, last, without, full)
        me.meet("before kill 1")
        if last:
            victim_waits(me, "kill 1")
        kill(me, "kill 1", False, victim, without)
        me.tell("vacant")
    else:
        me.told("vacant")
    begin = time.perf_counter()
    if newcomer:
        me.build()
    else:
        for lane in me.lanes:
            lane.handle.destroy()
            lane.fleet.update_topology(me.bootstrap)
            lane.start()
    me.mark("replaced by a new process, 3 Fleets, ms", f"{(time.perf_counter() - begin) * 1e3:.0f}")
    for lane in me.lanes:
        lane.step()
        torch.cuda.synchronize()
        me.meet(f"warm again/{lane.layout.name}")
        lane.record()
        lane.check(full, "after a replacement")
    me.mark("after a replacement", "equal to the reference")
    me.meet("before kill 2")
    if last:
        victim_waits(me, "kill 2")
    kill(me, "kill 2", True, victim, without)
    me.meet("end", victim)
    for lane in me.lanes:
        lane.fleet.destroy()


def stop_and_readmit(me, healthy, victim, last, without, full):
    me.meet("before stop")
    if last:
        victim_waits(me, "stop")
        for lane in me.lanes:
            lane.run(0, replayed=lane is me.lanes[0])
            torch.cuda.synchronize()
            assert lane.fleet.query_fault(), "the others went on without this rank, and its step was not flagged"
            assert lane.y.isfinite().all()
            with contextlib.suppress(MoEEpRankEvictedError):
                lane.fleet.reconcile_active_mask()
                raise AssertionError("not evicted")
    else:
        pid = int(me.told("stop/pid"))
        if me.rank == 0:
            os.kill(pid, signal.SIGSTOP)
        me.meet("stopped", victim)
        for lane in me.lanes:
            flagged, done = lane.until_flagged(lane is me.lanes[1], victim)
            me.mark(
                f"SIGSTOP, timeout_ms={SILENCE_MS}, {lane.layout.name}: flag / step done, ms",
                f"{flagged:.0f} / {done:.0f}",
            )
            most = 3 if me.world <= torch.cuda.device_count() else 8  # kernels that share a GPU wait half of the time
            assert 0.8 * SILENCE_MS < flagged < most * SILENCE_MS, flagged
            assert lane.fleet.faults.accused == 1 << victim, lane.fleet.faults
            lane.reconcile(without, timeout_s=0.5 * me.world)  # for the view of the rank that is stopped
            lane.check(without, "degraded by a stop")
        me.meet("degraded", victim)
        if me.rank == 0:
            os.kill(pid, signal.SIGCONT)
            me.tell("stop/go on")
    for lane, bits in zip(me.lanes, healthy):
        assert lane.fleet.clear_faults(readmit=True).tolist() == full
        assert all(torch.equal(a, b) for a, b in zip(lane.outputs(), bits)), (lane.layout, "bits after readmission")
    me.mark("after SIGCONT and readmission", "bits of a healthy run, eager and graph")


def kill(me, name, replayed, victim, without):
    pid = int(me.told(f"{name}/pid"))
    how = "graph" if replayed else "eager"
    for lane in me.lanes:
        first = lane is me.lanes[0]
        me.meet(f"{name}/{lane.layout.name}", victim)
        if first:
            act = (lambda: os.kill(pid, signal.SIGKILL)) if me.rank == 0 else None
            flagged, done = lane.until_flagged(replayed, victim, act)
            me.mark(
                f"SIGKILL, {how} {lane.layout.name}: kill to flag / to end of step, ms", f"{flagged:.2f} / {done:.2f}"
            )
        else:  # it is known to be dead already
            lane.run(0, replayed)
            torch.cuda.synchronize()
            assert lane.fleet.query_fault() and lane.y.isfinite().all()
        took = lane.reconcile(without)
        if first:
            me.mark(f"SIGKILL, {how}: reconcile and clear_faults, ms", f"{took:.1f}")
        lane.check(without, f"degraded by {name}")
    me.mark(f"after SIGKILL, {how}: degraded eager steps and replays", "equal to the reference")


def cost(me, _):
    """Paired medians of a step with and without the knob, both in one run that alternates them."""
    shapes = {"EXPERT_MAJOR": 128, "RANK_MAJOR": 128, "RANK_MAJOR T=1": 1}
    for name, tokens in shapes.items():
        layout = EpLayout[name.split()[0]]
        params = FleetParams(64, 128, 7168, layout=layout, max_topk=8)
        p = make_problem(7, me.world, 64, 7168, 8, [tokens] * me.world, torch.bfloat16)
        runs = {}
        for knobs in ((), (FleetAlgoKnobFaultTolerance(),)):
            fleet = create_fleet(me.bootstrap, params, list(knobs), backend=me.config)
            x, ids, weights = (t[me.rank].to(me.device) for t in (p.xs, p.topk_ids, p.topk_weights))
            handle = fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
            rows = torch.zeros_like(handle.dispatch(DispatchInputParams([x])).expert_tensors)
            y = torch.zeros_like(x)
            handle.combine(CombineInputParams([rows], out=y))
            runs[bool(knobs)] = fleet, _ten_steps(handle, ids, x, rows, y)
        for how in ("graph", "eager"):
            took = {False: [], True: []}
            replays = {knob: (me.capture(steps) if how == "graph" else steps) for knob, (_, steps) in runs.items()}
            for turn in range(24):
                for knob in (False, True) if turn % 2 else (True, False):
                    me.meet(f"cost/{name}/{how}/{turn}/{knob}")
                    took[knob].append(_microseconds(replays[knob]))
            pairs = [b / a for a, b in zip(took[False][4:], took[True][4:])]
            off, on = (statistics.median(took[knob][4:]) for knob in (False, True))
            me.mark(
                f"cost of the knob, {how}, {name}: us off / on, ratio",
                f"{off:.2f} / {on:.2f}, {statistics.median(pairs):.3f}",
            )
            del replays
        for fleet, _ in runs.values():
            assert not fleet.supports_fault_tolerance or not fleet.query_fault(), fleet.faults
        me.meet(f"cost/{name}/end")
        for fleet, _ in runs.values():
            fleet.destroy()


def _ten_steps(handle, ids, x, rows, y):
    def run():
        for _ in range(10):
            handle.update(HandleParams(ids))
            handle.dispatch(DispatchInputParams([x]))
            handle.combine(CombineInputParams([rows], out=y))

    return run


def _microseconds(steps):
    """Of one of ten steps, after ten that bring the ranks together."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    steps()
    begin.record()
    for _ in range(3):
        steps()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / 30


PARTS = {"two": (faults, 2), "cost": (cost, 2), "four": (faults, 4)}


def rank_main(part, rank, world, port, limit, newcomer, capture=captured):
    """A rank's process."""
    me = Rank(rank, world, port, limit, capture)
    try:
        PARTS[part][0](me, newcomer)
    except BaseException:
        me.store.set("failed", f"rank {rank}{' (new)' if newcomer else ''}")
        raise
    if rank == 0:
        me.store.set("marks", json.dumps(me.marks))


def run_part(part, limit, main=None):
    """Start the ranks of a part and wait for them. Returns rank 0's marks, and what went wrong."""
    world = PARTS[part][1]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, deadline = mp.get_context("spawn"), time.time() + limit

    def start(rank, newcomer=False):
        process = context.Process(target=main or rank_main, args=(part, rank, world, store.port, limit - 3, newcomer))
        process.start()
        return process

    ranks = [start(rank) for rank in range(world)]
    victims = []
    if part != "cost":
        victims = [ranks[-1], start(world - 1, newcomer=True)]
    staying = ranks[:-1] if victims else ranks
    trouble = ""
    while any(process.is_alive() for process in staying) and not trouble:
        time.sleep(0.1)
        if time.time() > deadline:
            trouble = "out of time"
        elif any(process.exitcode for process in staying):
            trouble = "a rank failed"
        elif any(process.exitcode not in (None, -signal.SIGKILL) for process in victims):
            trouble = "a victim failed before it was killed"
    trouble = trouble or ("a rank failed" if any(process.exitcode for process in staying) else "")
    time.sleep(1.0 if trouble else 0.0)  # for their tracebacks
    for process in (*ranks, *victims):
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.join(10)
    if trouble and store.check(["failed"]):
        trouble += f": {store.get('failed').decode()}"
    return json.loads(store.get("marks")) if store.check(["marks"]) else {}, trouble


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=("", *PARTS))
    parser.add_argument("--limit", type=float, default=170, help="seconds for everything")
    a = parser.parse_args()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    end, lines, failed = time.time() + a.limit, [], False
    for part in [a.only] if a.only else PARTS:
        begin = time.time()
        marks, trouble = run_part(part, max(5.0, end - begin))
        verdict = trouble.upper() or "ok"
        lines += [f"== {part}: {verdict} ({time.time() - begin:.0f} s)", *(f"   {k}: {v}" for k, v in marks.items())]
        failed |= bool(trouble)
    print("\n".join(["", *lines, f"faults: {'FAILED' if failed else 'all checks passed'}"]), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
