"""Does a Fleet leak? Many steps at random sizes on CPU ranks; prints each rank's resident memory along the way.

python benchmarks/soak.py --world 4 --steps 20000 --layout RANK_MAJOR
"""

from __future__ import annotations

import torch
import typer
from rich.console import Console
from rich.table import Table

import moefleet as m
from moefleet.launch import launch

SETTLED = 1000  # steps after which memory has to stay flat


def resident_kib() -> int:
    """Resident memory of this process that no file backs, in KiB: its own pages and the shared segments."""
    with open("/proc/self/status") as lines:
        sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def steps_of_one_rank(bootstrap: m.BootstrapConfig, steps: int, layout: str, transport: str) -> list[tuple[int, int]]:
    """Run verified steps; returns (step, KiB) at every tenth of the way."""
    hidden, experts, topk, most = 64, 16, 4, 32
    wanted = m.EpLayout[layout]
    algorithm = m.EpAlgorithm.HIGH_THROUGHPUT if wanted is m.EpLayout.FLAT else m.EpAlgorithm.LOW_LATENCY
    params = m.FleetParams(experts, most, hidden, 4, algorithm, wanted, max_topk=topk)
    g = torch.Generator().manual_seed(bootstrap.rank)
    seen = []
    split = m.SplitConfig(comm=transport, kernel=m.IdentityConfig())
    with m.MoEEpLayer(bootstrap, params, None, backend=split) as layer:
        for step in range(1, steps + 1):
            tokens = int(torch.randint(0, most + 1, (), generator=g))
            x = torch.randn(tokens, hidden, generator=g)
            ids = torch.randint(-1, experts, (tokens, topk), generator=g)
            weights = torch.rand(tokens, topk, generator=g)
            y = layer(m.MoEEpTensors(x, ids, weights))
            torch.testing.assert_close(y, x * (weights * (ids >= 0)).sum(1, keepdim=True))
            if step == SETTLED or step % max(1, steps // 10) == 0:
                seen.append((step, resident_kib()))
    return seen


def main(world: int = 4, steps: int = 20_000, layout: str = "EXPERT_MAJOR", transport: str = "shm") -> None:
    """Exit status 1 where a rank's memory grew by 2% or more after the first thousand steps."""
    results = launch(steps_of_one_rank, world, args=(steps, layout, transport), timeout_s=3600)
    table = Table("rank", "KiB after 1000 steps", f"KiB after {steps}", "growth", title=f"{transport} {layout}")
    worst = 0.0
    for result in results:
        if result.error is not None:
            raise result.error
        settled = next(kib for step, kib in result.value if step >= SETTLED)
        last = result.value[-1][1]
        worst = max(worst, last / settled - 1)
        table.add_row(str(result.rank), str(settled), str(last), f"{last / settled - 1:+.2%}")
    Console().print(table)
    raise SystemExit(int(worst >= 0.02))


if __name__ == "__main__":
    typer.run(main)
