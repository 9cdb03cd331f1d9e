"""What the fault-tolerance knob costs while nothing fails: two Fleets, with and without it, that take turns.

python benchmarks/fault_tolerance_cost.py --world 2 --tokens 128 --hidden 2048
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import typer
from rich.console import Console
from rich.table import Table

import moefleet as m
from moefleet.launch import launch

LAYOUTS = ("EXPERT_MAJOR", "RANK_MAJOR", "FLAT")


def one_rank(bootstrap: m.BootstrapConfig, layout: str, tokens: int, hidden: int, steps: int) -> list[float]:
    """Ratios (with the knob / without it) of each pair of steps."""
    wanted = m.EpLayout[layout]
    algorithm = m.EpAlgorithm.HIGH_THROUGHPUT if wanted is m.EpLayout.FLAT else m.EpAlgorithm.LOW_LATENCY
    params = m.FleetParams(64, tokens, hidden, 4, algorithm, wanted, max_topk=8)
    fleets = [m.create_fleet(bootstrap, params, knobs, "shm") for knobs in ((), (m.FleetAlgoKnobFaultTolerance(),))]
    g = torch.Generator().manual_seed(bootstrap.rank)
    x, weights = torch.randn(tokens, hidden, generator=g), torch.rand(tokens, 8, generator=g)
    ids = torch.rand(tokens, 64, generator=g).topk(8).indices
    routing = m.HandleParams(ids), [m.HandleAlgoKnobTopKWeights(weights)]
    handles = [fleet.create_handle(*routing) for fleet in fleets]

    def step(which: int) -> float:
        start = perf_counter()
        handles[which].update(*routing)
        arrived = handles[which].dispatch(m.DispatchInputParams([x]))
        rows = handles[which].combine_buffer()
        handles[which].combine(m.CombineInputParams([arrived.expert_tensors if rows is None else rows]))
        return perf_counter() - start

    pairs = []
    for number in range(steps):
        first = number % 2
        times = {which: step(which) for which in (first, 1 - first)}
        pairs.append(times[1] / times[0])
    for fleet in fleets:
        fleet.destroy()
    return pairs[steps // 10 :]


def main(world: int = 2, tokens: int = 128, hidden: int = 2048, steps: int = 1000) -> None:
    """Prints the median ratio of paired steps, over all ranks."""
    table = Table("layout", "with the knob / without", title=f"shm, {world} ranks, T {tokens}, H {hidden}, float32")
    for layout in LAYOUTS:
        results = launch(one_rank, world, args=(layout, tokens, hidden, steps), timeout_s=300)
        for result in results:
            if result.error is not None:
                raise result.error
        table.add_row(layout, f"{median(ratio for result in results for ratio in result.value):.3f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
