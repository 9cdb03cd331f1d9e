"""What symmetric memory needs of a store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from moefleet.substrate.symmetric import CountingFromZero


def test_exchanges_are_counted_from_the_groups_first() -> None:
    """A process whose earlier groups made seven exchanges finds one that made none. Called from C++, as torch does."""
    shared = dist.HashStore()
    old, new = CountingFromZero(shared), CountingFromZero(shared)
    for exchange in range(2):
        for rank, (store, number) in enumerate(((old, 7 + exchange), (new, exchange))):
            dist.PrefixStore("Topic", store).set(f"{number}/{rank}", f"{exchange} of {rank}")
        for rank, (store, number) in enumerate(((old, 7 + exchange), (new, exchange))):
            from_cpp, other = dist.PrefixStore("Topic", store), f"{number}/{1 - rank}"
            from_cpp.wait([other], timedelta(seconds=1))
            from_cpp.wait([other])
            assert from_cpp.get(other) == f"{exchange} of {1 - rank}".encode()
