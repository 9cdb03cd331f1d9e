"""Times of CUDA-graph replays and of eager steps on several GPUs, all candidates alternating in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

Step = Callable[[], object]


def capture(steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
    """A graph that holds each step once, after one warm-up of each on a side stream. All ranks call this together."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    torch.cuda.synchronize()
    dist.barrier()
    return graph


def alternating_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph], steps: int, *, rounds: int = 5, replays: int = 20
) -> dict[str, float]:
    """Microseconds per step of each graph of ``steps`` steps: the slowest rank, the median over rounds.

    In each round every graph takes its turn: a few replays to get in step, then ``replays`` in a row that are timed.
    """
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            took[name].append(begin.elapsed_time(end) * 1e3 / replays / steps)
    return _slowest({name: median(times) for name, times in took.items()})


def eager_us(steps: Mapping[str, Step], *, rounds: int = 5, runs: int = 30) -> dict[str, float]:
    """Microseconds per eager step of each candidate: the slowest rank, the median of all runs, in turns."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            dist.barrier()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
            marks[0].record()
            for mark in marks[1:]:
                step()
                mark.record()
            torch.cuda.synchronize()
            took[name] += [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
    return _slowest({name: median(times) for name, times in took.items()})


def routing(tokens: int, experts: int, topk: int, seed: int, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k ids int64 and softmax weights on the GPU; ``skew > 0`` draws experts from a Zipf law with that exponent."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    u = torch.rand(tokens, experts, device="cuda", generator=g)
    popularity = torch.arange(1, experts + 1, device="cuda", dtype=torch.float32) ** -skew
    scores, ids = (u ** (1 / popularity)).topk(topk)
    return ids.contiguous(), torch.softmax(scores, -1).float().contiguous()


def _slowest(mine: dict[str, float]) -> dict[str, float]:
    worst = torch.tensor(list(mine.values()), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(mine, worst.tolist(), strict=True))
