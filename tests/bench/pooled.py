"""In place of ranks that a run starts for itself: the shared ones, which have loaded what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moefleet.launch import RankResult
from tests.conformance.pool import shared_pool


class Pooled:
    """The first ranks of the shared pool."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def run(self, fn: Any, *args: Any, timeout_s: float) -> list[RankResult]:
        return shared_pool().run(fn, *args, timeout_s=timeout_s, world_size=self._world_size)


@contextmanager
def pooled_ranks(world_size: int, *, threads_per_rank: int | None = None) -> Iterator[Pooled]:
    """As ``moefleet.launch.torchrun.ranks``, with one thread to a rank whatever is asked for."""
    yield Pooled(world_size)
