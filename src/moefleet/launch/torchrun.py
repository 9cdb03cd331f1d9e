"""Calls on the ranks that torchrun started: each process runs its own, and all get what all returned."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore

from ..config import BootstrapConfig
from ..errors import MoEEpTimeoutError, config_error
from ..fleet.stores import resolve_store
from .pool import RankPool, usable_cores
from .rank import failure, returned
from .results import RankResult, rebuild
from .wire import Reply, Said

_numbers = itertools.count()


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or something like it, started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def reports() -> bool:
    """Whether this process is the one that tells and writes what came of a run."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def ranks(world_size: int, *, threads_per_rank: int | None = None) -> RankPool | TorchrunPool:
    """Where calls run: on torchrun's ranks in a process that is one of them, else on ranks that are started here."""
    kind = TorchrunPool if under_torchrun() else RankPool
    return kind(world_size, threads_per_rank=threads_per_rank)


class TorchrunPool:
    """The calls of a :class:`RankPool` by processes that are ranks themselves. All of them make the same calls.

    A rank that fails or raises does not end the others, but one that is gone is waited for until the timeout.

    Args:
        world_size: the first of torchrun's ranks, which run what is called; the others only learn the results.
        threads_per_rank: size of torch's thread pool; ``None`` divides the cores.

    Raises:
        MoEEpConfigError: more ranks than torchrun started.
    """

    def __init__(self, world_size: int, *, threads_per_rank: int | None = None) -> None:
        self._here = BootstrapConfig.from_env()
        if world_size > self._here.world_size:
            raise config_error("world", world_size, f"at most {self._here.world_size}, as torchrun started them")
        self._world = world_size
        self._store = PrefixStore(f"moefleet-pool-{next(_numbers)}", resolve_store(self._here))
        self._threads = threads_per_rank or max(1, usable_cores() // world_size)
        self._calls = 0

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[RankResult]:
        """Run ``fn(bootstrap, *args)`` on the ranks; see :meth:`RankPool.run`.

        Args:
            timeout_s: for a rank's result after this one's.
        """
        self._calls += 1
        store = PrefixStore(f"call-{self._calls}", self._store)
        if self._here.rank < self._world:
            said = pickle.dumps(self._run_here(fn, args, store))
            store.set(f"result-{self._here.rank}", said)  # type: ignore[arg-type]  # bytes are what get returns, too
        deadline = time.monotonic() + timeout_s
        return [self._result_of(rank, store, deadline) for rank in range(self._world)]

    def _run_here(self, fn: Callable[..., Any], args: tuple[Any, ...], store: PrefixStore) -> tuple[Reply, bytes]:
        torch.set_num_threads(self._threads)
        try:
            value = fn(replace(self._here, world_size=self._world, tcp_store=PrefixStore("fn", store)), *args)
        except Exception as error:
            return failure(Said.RAISED, error)
        return returned(self._here.rank, value)

    def _result_of(self, rank: int, store: PrefixStore, deadline: float) -> RankResult:
        key = f"result-{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            reply, body = pickle.loads(store.get(key))
        except DistError as error:
            return RankResult(rank, None, MoEEpTimeoutError(f"rank {rank} did not return: {error}", ranks=[rank]), None)
        if reply.said is Said.RAISED:
            return RankResult(rank, None, rebuild(rank, reply, body), 1)
        return RankResult(rank, pickle.loads(body), None, 0)

    def __enter__(self) -> TorchrunPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass
