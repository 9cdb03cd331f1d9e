"""Stores for tests: one that counts, one that dies, and ranks that call at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moefleet.fleet.agreement import Agreement, Decision
from moefleet.knobs import FleetAlgoKnobFaultTolerance

LONG_S = 100.0
"""A time-out that must not be what ends a wait: longer than a test may take."""

HOST = (
    "import sys, torch.distributed as dist; "
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); sys.stdin.read()"
)


class WatchedStore:
    """Passes operations on, counts them by what they are, and lets a test step in before each.

    Args:
        store: the real store.
        before: called with the kind of operation ("read", "post" or "offer") and its key.
    """

    def __init__(self, store: Any, before: Callable[[str, str], None] = lambda kind, key: None) -> None:
        self.store, self.before = store, before
        self.counts: Counter[str] = Counter()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._do("offer" if expected == "" else "read", key, self.store.compare_set, key, expected, value)

    def append(self, key: str, value: str) -> None:
        self._do("post", key, self.store.append, key, value)

    def clone(self) -> WatchedStore:
        return self

    def has_extended_api(self) -> bool:
        return True

    def _do(self, kind: str, key: str, call: Callable[..., Any], *arguments: str) -> Any:
        self.before(kind, key)
        result = call(*arguments)
        self.counts[kind] += 1
        return result


def dies_before(kind: str) -> Callable[[str, str], None]:
    """For :class:`WatchedStore`: its rank ends before the first operation of this kind."""

    def before(doing: str, key: str) -> None:
        if doing == kind:
            raise ConnectionError("this rank died")

    return before


def options(reconcile_s: float = LONG_S, takeover_s: float = LONG_S, **more: Any) -> FleetAlgoKnobFaultTolerance:
    return FleetAlgoKnobFaultTolerance(reconcile_timeout_s=reconcile_s, coordinator_takeover_s=takeover_s, **more)


def ranks_of(store: Any, world: int, knob: FleetAlgoKnobFaultTolerance, **more: Any) -> list[Agreement]:
    return [Agreement(store, rank, world, knob, **more) for rank in range(world)]


def together(calls: dict[int, Callable[[], Decision]]) -> dict[int, Decision | Exception]:
    """Make each rank's call in a thread of its own; what each returned or raised."""
    results: dict[int, Decision | Exception] = {}

    def run(rank: int, call: Callable[[], Decision]) -> None:
        try:
            results[rank] = call()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def reconcile_all(
    ranks: list[Agreement],
    accused: dict[int, set[int]] | None = None,
    steps: dict[int, int] | None = None,
    timeout_s: float | None = None,
) -> dict[int, Decision | Exception]:
    """All of these ranks reconcile at once."""
    accused, steps = accused or {}, steps or {}

    def call(rank: Agreement) -> Callable[[], Decision]:
        me = rank.rank
        return lambda: rank.reconcile(accused.get(me, set()), steps.get(me, 0), timeout_s=timeout_s)

    return together({rank.rank: call(rank) for rank in ranks})


class StoreHost:
    """A TCPStore in a process of its own, which a test may stop or kill."""

    def __enter__(self) -> StoreHost:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        return self

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
