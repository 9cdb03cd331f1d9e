"""Ranks with the compiled helper and ranks without it: each kind alone, and both in one Fleet, give the same bits."""

from __future__ import annotations

import os

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout, native
from tests.conformance.pool import shared_pool
from tests.native.needs import needs_the_helper
from tests.transports.shm.ranks import fleet_of, step

pytestmark = needs_the_helper

ALL, NONE, SOME = [True] * 3, [False] * 3, [True, False, True]


def steps(bootstrap: BootstrapConfig, layout: EpLayout, in_c: list[bool]) -> list[torch.Tensor]:
    """What a few steps give on this rank."""
    before = os.environ.get(native.SWITCH)
    os.environ[native.SWITCH] = str(int(in_c[bootstrap.rank]))
    try:
        with fleet_of(bootstrap, layout) as fleet:
            assert fleet.stats()["native"] is in_c[bootstrap.rank]
            return [step(fleet, seed) for seed in range(8)]
    finally:
        os.environ.pop(native.SWITCH) if before is None else os.environ.update({native.SWITCH: before})


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_the_same_bits(layout: EpLayout) -> None:
    outcomes = [shared_pool().run(steps, layout, kind, world_size=3) for kind in (ALL, NONE, SOME)]
    for rank in range(3):
        for outcome in outcomes:
            assert outcome[rank].error is None, outcome[rank].error
        for one, *others in zip(*(outcome[rank].value for outcome in outcomes)):
            for other in others:
                assert torch.equal(one, other)
