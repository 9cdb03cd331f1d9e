"""The ranks that the test folders share: started with the first call, ended with the test run."""

from __future__ import annotations

import atexit
from functools import cache

from moefleet.launch import RankPool

MOST_RANKS = 4


@cache
def shared_pool() -> RankPool:
    pool = RankPool(MOST_RANKS, threads_per_rank=1)
    atexit.register(pool.close)
    return pool
