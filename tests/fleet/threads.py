"""Ranks as threads of this process, for what needs no shared memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from moefleet import BootstrapConfig

WAIT_S = 20.0


def side_by_side(world: int, fn: Callable[..., Any], *args: Any, store: Any = None, **fields: Any) -> list[Any]:
    """``fn(bootstrap, *args)`` on every rank: what it returned, or the exception it raised."""
    store = dist.HashStore() if store is None else store
    fields = {"timeout_s": WAIT_S, "device": "cpu", **fields}
    boots = [BootstrapConfig(world, rank, tcp_store=store, **fields) for rank in range(world)]

    def outcome(bootstrap: BootstrapConfig) -> Any:
        try:
            return fn(bootstrap, *args)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(outcome, boots))
