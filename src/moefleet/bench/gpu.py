"""How ranks measure on GPUs: one case after the other, all candidates of a case alternating.

Times are from CUDA graphs that hold one step for each routing, and from eager steps; the slowest rank counts. Before
and after, every result is held against what sending the received rows back has to give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from ..config import BootstrapConfig, EpLayout, FleetParams
from ..errors import MoEEpError
from ..fleet import available_backends, probe
from ..launch.devices import take_device
from ..placement import Placement
from ..reference import tolerance
from .cases import ROUTINGS, CommCase
from .gpu_candidate import GpuCandidate, TransportCandidate
from .gpu_peers import PEERS, Pool
from .gpu_timing import alternating_us, capture, eager_us, meet, phases_us
from .rank import join

LEAST_ROOM = 128
"""``max_tokens_per_rank`` of all candidates, at least: what NCCL-EP asks for."""


@dataclass(frozen=True)
class GpuPlan:
    """What to run.

    Args:
        cases: all with the same ``world``.
        candidates: names in the order of the report, the first one compared with; empty for all there are.
        rounds: how often the candidates of a case take turns; replays: of a graph in each turn.
        eager: whether eager steps are timed too.
        link: whether what the links carry is measured, for the floor.
        timeout_s: for a rank that does not come.
    """

    cases: Sequence[CommCase]
    candidates: Sequence[str] = ()
    rounds: int = 5
    replays: int = 20
    eager: bool = True
    link: bool = True
    timeout_s: float = 120.0


@dataclass
class Timed:
    """One candidate in one case, microseconds; ``nan`` where it cannot be captured or was not asked for.

    Attributes:
        graph, eager: a whole step.
        dispatch, combine: its phases, from a graph with events between them, or eager where it cannot be captured.
        error: largest error in multiples of what rounding allows.
    """

    graph: float = math.nan
    eager: float = math.nan
    dispatch: float = math.nan
    combine: float = math.nan
    error: float = math.nan


@dataclass
class GpuResult:
    """What one case gave: ``left_out`` says for each other candidate why it did not run."""

    case: CommCase
    timed: dict[str, Timed]
    left_out: dict[str, str]


@dataclass
class GpuRun:
    """All cases, and what each rank pushes over its links while all push (GB/s; 0 where nobody looked)."""

    results: list[GpuResult] = field(default_factory=list)
    push_gbps: float = 0.0
    gpu: str = ""


def measure_here(bootstrap: BootstrapConfig, plan: GpuPlan) -> GpuRun:
    """Run the plan as one of its ranks. All ranks get the same result."""
    enter(bootstrap, plan.timeout_s)
    try:
        run = GpuRun(gpu=torch.cuda.get_device_name())
        if plan.link and bootstrap.world_size > 1:
            from .gpu_link import push_gbps

            run.push_gbps = push_gbps(dist.PrefixStore("push", dist.distributed_c10d._get_default_store()))
        run.results = [measure_case(case, plan) for case in plan.cases]
        return run
    finally:
        dist.destroy_process_group()


def enter(bootstrap: BootstrapConfig, timeout_s: float) -> None:
    """Take this rank's GPU and join its peers, by NCCL for tensors and gloo for words."""
    mine = replace(take_device(bootstrap, "cuda"), timeout_s=timeout_s)
    join(mine, "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device()))


def measure_case(case: CommCase, plan: GpuPlan) -> GpuResult:
    """All candidates of a case, side by side."""
    pool = [(ids.cuda(), weights.cuda()) for ids, weights in (case.routed(dist.get_rank(), n) for n in range(ROUTINGS))]
    x = case.x(dist.get_rank()).cuda()
    candidates, left_out = build(case, plan, pool, x)
    timed = {name: Timed() for name in candidates}
    for name, candidate in candidates.items():
        timed[name].error = worst_error(case, candidate, pool, x)
    graphs = {
        name: capture([partial(candidate.step, n) for n in range(ROUTINGS)])
        for name, candidate in candidates.items()
        if candidate.graphs
    }
    replays = max(2, plan.replays // (1 + case.tokens // 1024))
    for name, us in alternating_us(graphs, ROUTINGS, rounds=plan.rounds, replays=replays).items():
        timed[name].graph = us
    if plan.eager:
        for name, us in eager_us({n: c.step for n, c in candidates.items()}, rounds=plan.rounds, runs=2).items():
            timed[name].eager = us
    for name, candidate in candidates.items():
        phases = [(partial(candidate.dispatch, n), partial(candidate.combine, n)) for n in range(ROUTINGS)]
        timed[name].dispatch, timed[name].combine = phases_us(phases, graph=candidate.graphs)
        timed[name].error = max(timed[name].error, worst_error(case, candidate, pool, x))
    graphs.clear()
    for candidate in candidates.values():
        candidate.close()
    torch.cuda.empty_cache()
    return GpuResult(case, timed, left_out)


def build(case: CommCase, plan: GpuPlan, pool: Pool, x: torch.Tensor) -> tuple[dict[str, GpuCandidate], dict[str, str]]:
    """The candidates that every rank can build, and why not for the others."""
    params = replace(case.params, max_tokens_per_rank=max(LEAST_ROOM, case.tokens))
    bootstrap = BootstrapConfig(
        case.world, dist.get_rank(), process_group=dist.group.WORLD, device=x.device, timeout_s=plan.timeout_s
    )
    built: dict[str, GpuCandidate] = {}
    left_out: dict[str, str] = {}
    for name in plan.candidates or (*available_backends(), *PEERS):
        reason = agreed(why_not(name, case, params, bootstrap))
        if not reason:
            try:
                candidate: GpuCandidate = (
                    PEERS[name](case, pool, x, params.max_tokens_per_rank)
                    if name in PEERS
                    else TransportCandidate(name, params, pool, x, bootstrap)
                )
                candidate.step()
                torch.cuda.synchronize()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = agreed(reason)
        if reason:
            left_out[name] = reason
        else:
            built[name] = candidate
    return built, left_out


def why_not(name: str, case: CommCase, params: FleetParams, bootstrap: BootstrapConfig) -> str:
    """Why this rank cannot build a candidate."""
    if name in PEERS:
        return PEERS[name].why_not(case)
    try:
        return probe(name.partition(":")[0], bootstrap, params).reason
    except MoEEpError as error:
        return str(error)


def agreed(reason: str) -> str:
    """Some rank's reason, the same on all; empty if no rank has one."""
    everybody: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, reason)
    return next((f"rank {rank}: {each}" if rank else each for rank, each in enumerate(everybody) if each), "")


def worst_error(case: CommCase, candidate: GpuCandidate, pool: Pool, x: torch.Tensor) -> float:
    """The largest error over all routings and ranks, in multiples of what rounding allows.

    Rows come back as they went: times their weights in EXPERT_MAJOR, once from each rank that has an expert elsewhere.
    """
    worst = torch.zeros(1, dtype=torch.float64, device=x.device)
    owner = Placement.contiguous(case.experts, case.world).owner_table.to(x.device)
    for number, (ids, weights) in enumerate(pool):
        y = candidate.step(number)
        if not y.numel():
            continue
        if case.layout is EpLayout.EXPERT_MAJOR:
            factor = weights.double().sum(1, keepdim=True)
        else:
            served = torch.zeros(len(ids), case.world, device=x.device).scatter_(1, owner[ids], 1.0)
            factor = served.double().sum(1, keepdim=True)
        largest = float((x.double() * factor.clamp(min=1)).abs().max())
        off = (y.double() - x.double() * factor).abs().nan_to_num(math.inf).max()
        worst = torch.maximum(worst, off / tolerance(case.dtype, case.world, case.topk, largest))
    meet()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)
