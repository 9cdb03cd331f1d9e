"""Ranks that leave on their own account say DEPARTED: by destroy, by an exception that nobody catches, at exit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from moefleet import BootstrapConfig, MoEEpPeerError
from moefleet.launch import launch
from tests.conformance.pool import shared_pool
from tests.transports.shm.leftovers import grown, of_this_process
from tests.transports.shm.ranks import fleet_of, step

KEPT: list[Any] = []
"""Fleets that are there until the interpreter ends."""


def raises() -> None:
    raise ZeroDivisionError("nobody catches this")


def returns() -> None:
    """The process ends by itself, with the Fleet as it is."""


def exits_at_once() -> None:
    os._exit(3)


WAYS = {1: (raises, 1, "it has left"), 2: (returns, 0, "it has left"), 3: (exits_at_once, 3, "its process has ended")}
"""For each rank how it ends, with which exit code, and what rank 0 says of it."""


def ends(bootstrap: BootstrapConfig) -> Any:
    """Rank 0 has a Fleet with each of the others, and finds out about each."""
    ways = range(1, 4) if bootstrap.rank == 0 else [bootstrap.rank]
    for way in ways:
        store = dist.PrefixStore(str(way), bootstrap.tcp_store)
        pair = BootstrapConfig(2, min(bootstrap.rank, 1), tcp_store=store)
        KEPT.append(fleet_of(pair))
        step(KEPT[-1])
    if bootstrap.rank:
        return WAYS[bootstrap.rank][0]()
    errors = []
    for fleet in KEPT:
        with pytest.raises(MoEEpPeerError) as caught:
            step(fleet)
        errors.append(caught.value)
    return errors


def test_the_end_of_a_process() -> None:
    alive, *ended = launch(ends, 4, timeout_s=60.0, threads_per_rank=1)
    assert alive.error is None, alive.error
    assert [result.exitcode for result in ended] == [exitcode for _, exitcode, _ in WAYS.values()]
    for error, (_, _, told) in zip(alive.value, WAYS.values()):
        assert error.rank == 1 and told in error.reason


def in_a_with_block(bootstrap: BootstrapConfig) -> Any:
    before = of_this_process()
    error: Any = None
    try:
        with fleet_of(bootstrap) as fleet:
            step(fleet)
            if bootstrap.rank == 1:
                raise ZeroDivisionError("out of the with block")
            step(fleet)
    except (ZeroDivisionError, MoEEpPeerError) as caught:
        error = caught.with_traceback(None)
    del fleet
    return error, before, of_this_process()


def test_an_exception_out_of_a_with_block() -> None:
    pool = shared_pool()
    pool.run(in_a_with_block)  # what a first Fleet leaves in a process for good is there
    for result in pool.run(in_a_with_block):
        assert result.error is None, result.error
        error, before, after = result.value
        if result.rank == 1:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert isinstance(error, MoEEpPeerError) and error.rank == 1 and "it has left" in error.reason
        assert not grown(before, after)
