"""Times of CUDA-graph replays and of eager steps on several GPUs, all candidates alternating in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

Step: TypeAlias = Callable[[], object]
Phases: TypeAlias = Sequence[Step]
"""The calls of one step, in order."""

TOGETHER = 10
"""Eager steps of a run, between two events."""


def capture(steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
    """A graph that holds each step once, after one warm-up of each on a side stream. All ranks call this together."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for step in steps:
            step()
    meet()
    return graph


def alternating_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph], steps: int, *, rounds: int = 5, replays: int = 20
) -> dict[str, float]:
    """Microseconds per step of each graph of ``steps`` steps: the slowest rank, the median over rounds.

    In each round every graph takes its turn: a few replays to get in step, then ``replays`` in a row that are timed.
    """
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds):
        for name in in_turn(graphs, number):
            for _ in range(3):
                graphs[name].replay()
            meet()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            took[name].append(begin.elapsed_time(end) * 1e3 / replays / steps)
    return slowest({name: median(times) for name, times in took.items()})


def eager_us(steps: Mapping[str, Step], *, rounds: int = 5, runs: int = 3) -> dict[str, float]:
    """Microseconds per eager step of each candidate: the slowest rank, the median of runs of ten, in turns.

    In each round every candidate takes its turn: a few steps to get in step, then ``runs`` of ten in a row. An event
    takes the host about 8 us, a fifth of a step that waits for the host and nothing of one that waits for the GPU. So
    there is none within a run.
    """
    took: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in in_turn(steps, number):
            for _ in range(5):
                steps[name]()
            meet()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
            marks[0].record()
            for mark in marks[1:]:
                for _ in range(TOGETHER):
                    steps[name]()
                mark.record()
            torch.cuda.synchronize()
            took[name] += [a.elapsed_time(b) * 1e3 / TOGETHER for a, b in pairwise(marks)]
    return slowest({name: median(times) for name, times in took.items()})


def phases_us(steps: Sequence[Phases], *, graph: bool, runs: int = 20) -> list[float]:
    """Microseconds of each phase of a step, between events: the slowest rank, the median over ``runs`` of ``steps``.

    With ``graph`` the steps and the events between their phases are replayed from a graph. An event keeps the next
    kernel from starting early, so phases add up to more than the step.
    """
    count = len(steps[0])
    marks = [
        [torch.cuda.Event(enable_timing=True, external=graph) for _ in range(count + 1)] for _ in range(len(steps))
    ]

    def run() -> None:
        for phases, events in zip(steps, marks, strict=True):
            events[0].record()
            for phase, event in zip(phases, events[1:], strict=True):
                phase()
                event.record()

    again = capture([run]).replay if graph else run
    took: list[list[float]] = []
    for _ in range(3 + runs):
        again()
        meet()
        took += [[a.elapsed_time(b) * 1e3 for a, b in pairwise(events)] for events in marks]
    mine = {str(phase): median(step[phase] for step in took[3 * len(steps) :]) for phase in range(count)}
    return list(slowest(mine).values())


def in_turn(names: Mapping[str, object], number: int) -> list[str]:
    """The names, another one first in each round."""
    every = list(names)
    first = number % max(1, len(every))
    return every[first:] + every[:first]


def meet() -> None:
    """All ranks come, and their GPUs have nothing left to do."""
    torch.cuda.synchronize()
    dist.barrier()


def slowest(mine: dict[str, float]) -> dict[str, float]:
    """The largest of all ranks, name by name."""
    if not mine:
        return {}
    worst = torch.tensor(list(mine.values()), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(mine, worst.tolist(), strict=True))
