"""Time how long ranks take to agree on one mask over one store, and count their store operations.

    python benchmarks/agreement.py                        # 256 ranks, nobody missing
    python benchmarks/agreement.py --ranks 64 --dead 3    # three ranks are proven dead

Ranks are threads that share a few connections to one TCPStore, which another process hosts. A time is that from the
first rank's call to the last rank's return, threads and all; the median of several rounds is reported.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch.distributed as dist

from moefleet.fleet.agreement import Agreement

HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class CountingStore:
    """Passes on the operations of a store and counts them."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self._counts[name] += 1
            return method(*arguments)

        return counted

    def clone(self) -> CountingStore:
        return self  # the connections are there already

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()


def one_round(ranks: list[Agreement], dead: set[int], step: int) -> float:
    """Seconds until all who live have the same decision."""
    decisions: dict[int, Any] = {}

    def call(rank: int) -> None:
        decisions[rank] = ranks[rank].reconcile(dead, step)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(ranks)) if rank not in dead]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert len(set(decisions.values())) == 1, "ranks disagree"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--dead", type=int, default=0, help="how many of them are dead, in the middle")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    middle = (options.ranks - options.dead) // 2
    dead = set(range(middle, middle + options.dead))
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        clients = [
            dist.PrefixStore("bench", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
            for _ in range(min(options.connections, options.ranks))
        ]
        counts: list[Counter[str]] = [Counter() for _ in range(options.ranks)]
        ranks = [
            Agreement(CountingStore(clients[rank % len(clients)], counts[rank]), rank, options.ranks, dead=lambda: dead)
            for rank in range(options.ranks)
        ]
        one_round(ranks, dead, 0)
        for count in counts:
            count.clear()
        times = [one_round(ranks, dead, number + 1) for number in range(options.rounds)]
        alive = [sum(count.values()) for rank, count in enumerate(counts) if rank not in dead]
        rounds = options.rounds
        median = statistics.median(times)
        print(f"{len(alive)} of {options.ranks} ranks agree in {median:.3f} s (median of {rounds} rounds)")
        print(
            f"store operations of a rank in a round: median {statistics.median(alive) / rounds:.1f}, "
            f"lowest rank {alive[0] / rounds:.1f}, most {max(alive) / rounds:.1f}"
        )
    finally:
        host.kill()


if __name__ == "__main__":
    main()
