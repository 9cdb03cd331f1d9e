"""Calls on the ranks that torchrun started: each process runs its own, and all get what all returned."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.distributed import DistError, DistStoreError, PrefixStore

from ..config import BootstrapConfig
from ..errors import MoEEpStoreError, MoEEpTimeoutError, config_error
from ..fleet.stores import resolve_store
from . import plain
from .pool import GOODBYE_GRACE_S, RankPool, usable_cores
from .results import RankResult

T = TypeVar("T")
_numbers = itertools.count()


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or something like it, started.

    A lone process whose shell has ``RANK=0`` and ``WORLD_SIZE=1`` is not, unless torchrun says so.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ["WORLD_SIZE"].strip() != "1"


def reports() -> bool:
    """Whether this process is the one that tells and writes what came of a run."""
    return not under_torchrun() or os.environ["RANK"].strip() == "0"


def ranks(
    world_size: int, *, threads_per_rank: int | None = None, preload: Sequence[str] = ()
) -> RankPool | TorchrunPool:
    """Where calls run: on torchrun's ranks in a process that is one of them, else on ranks that are started here."""
    if under_torchrun():
        return TorchrunPool(world_size, threads_per_rank=threads_per_rank)
    return RankPool(world_size, threads_per_rank=threads_per_rank, preload=preload)


def first_says(fn: Callable[[], T]) -> T:
    """What fn returns or raises: on torchrun's first rank, for all of its ranks; elsewhere here.

    Args:
        fn: returns what :meth:`TorchrunPool.run` can send.
    """
    if not under_torchrun():
        return fn()
    with TorchrunPool(1) as first:
        (result,) = first.run(lambda bootstrap: fn())
    if result.error is not None:
        raise result.error
    value: T = result.value
    return value


class TorchrunPool:
    """The calls of a :class:`RankPool` by processes that are ranks themselves. All of them make the same calls.

    A rank that fails or raises does not end the others, but one that is gone is waited for until the timeout.

    Args:
        world_size: the first of torchrun's ranks, which run what is called; the others only learn the results.
        threads_per_rank: size of torch's thread pool; ``None`` divides the cores.

    Raises:
        MoEEpConfigError: more ranks than torchrun started.
        MoEEpStoreError: there is no store at ``MASTER_ADDR`` and ``MASTER_PORT``.
    """

    def __init__(self, world_size: int, *, threads_per_rank: int | None = None) -> None:
        self._here = BootstrapConfig.from_env()
        if world_size > self._here.world_size:
            raise config_error("world", world_size, f"at most {self._here.world_size}, as torchrun started them")
        self._world = world_size
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store keeps what earlier starts wrote
        self._store = PrefixStore(f"moefleet-pool-{start}-{next(_numbers)}", resolve_store(self._here))
        self._threads = threads_per_rank or max(1, usable_cores() // world_size)
        self._calls = 0

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[RankResult]:
        """Run ``fn(bootstrap, *args)`` on the ranks; see :meth:`RankPool.run`.

        fn and its arguments stay in this process. What fn returns is sent as text, not pickled: ``None``, numbers,
        texts, NumPy arrays of numbers, and lists and dicts of these. Of an error its class, if it is moefleet's, and
        its message arrive.

        Args:
            timeout_s: for a rank's result after this one's.

        Raises:
            MoEEpStoreError: the store that the ranks share failed.
        """
        self._calls += 1
        store = PrefixStore(f"call-{self._calls}", self._store)
        try:
            if self._here.rank < self._world:
                store.set(f"result-{self._here.rank}", self._run_here(fn, args, store))
            deadline = time.monotonic() + timeout_s
            return [self._result_of(rank, store, deadline) for rank in range(self._world)]
        except DistError as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise MoEEpStoreError(f"the store at {address} does not answer: {error}") from error

    def _run_here(self, fn: Callable[..., Any], args: tuple[Any, ...], store: PrefixStore) -> str:
        torch.set_num_threads(self._threads)
        try:
            value = fn(replace(self._here, world_size=self._world, tcp_store=PrefixStore("fn", store)), *args)
        except Exception as error:
            return plain.dumps(plain.describe(error))
        try:
            return plain.dumps({"value": value})
        except TypeError as error:
            allowed = "None, numbers, texts, arrays of numbers, and lists and dicts of these"
            refusal = config_error(f"return value of fn on rank {self._here.rank}", error, allowed)
            return plain.dumps(plain.describe(refusal))

    def _result_of(self, rank: int, store: PrefixStore, deadline: float) -> RankResult:
        key = f"result-{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except DistStoreError as error:  # a wait that is over; whatever else fails is a DistNetworkError
            return RankResult(rank, None, MoEEpTimeoutError(f"rank {rank} did not return: {error}", ranks=[rank]), None)
        try:
            said = plain.loads(store.get(key))
            if "value" in said:
                return RankResult(rank, said["value"], None, 0)
            return RankResult(rank, None, plain.rebuild(said), 1)
        except (ValueError, TypeError, KeyError) as error:
            unreadable = MoEEpStoreError(f"what the store has as the result of rank {rank} is none: {error!r}")
            return RankResult(rank, None, unreadable, None)

    def __enter__(self) -> TorchrunPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave; rank 0, whose process may host the store, after the others, or those that leave in a few seconds."""
        if kind is not None and not issubclass(kind, Exception):
            return  # interrupted
        with contextlib.suppress(DistError):
            self._store.set(f"left-{self._here.rank}", "")
            if self._here.rank == 0:
                others = [f"left-{rank}" for rank in range(1, self._here.world_size)]
                self._store.wait(others, timedelta(seconds=GOODBYE_GRACE_S))
