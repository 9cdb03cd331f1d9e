"""Ranks that do not get through building a Fleet: the others are told at once, and the next attempt works."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from moefleet import EpLayout, FleetParams, MoEEpError, MoEEpPeerError
from moefleet.fleet import Meeting
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


def gone() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broken() -> None:
    raise OSError("the disk is on fire")


class Stumbling(Meeting):
    """Something happens to rank 1 where it should come to its n-th exchange."""

    exchanges_left = 0
    happens: Any = None

    def exchange(self, step: str, make: Any) -> Any:
        if self.rank == 1 and self.happens is not None:
            self.exchanges_left -= 1
            if self.exchanges_left < 0:
                self.happens()
        return super().exchange(step, make)


def stumbles(ctx: RankContext, params: FleetParams, problem: Problem, exchanges: list[int], happens: Any) -> Any:
    """Attempts to build that fail on rank 1 before these exchanges, and one that works."""
    errors = []
    for left in exchanges:
        meeting = Stumbling(ctx.bootstrap)
        meeting.exchanges_left, meeting.happens = left, happens
        with pytest.raises((MoEEpError, OSError)) as caught:
            ctx.fleet(params, meeting=meeting)
        errors.append(caught.value)
    if happens is gone:
        return errors, None
    return errors, step(ctx.fleet(params), *ctx.mine(problem))[1]


def test_a_rank_that_fails(ranks: Ranks) -> None:
    """Before it comes, while the others share memory or connect, and when they are nearly done."""
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    by_rank = ranks(stumbles, params, problem, [0, 1, 2] if ranks.device == "cpu" else [0, 1], broken)
    for rank, (errors, _) in enumerate(by_rank):
        for error in errors:
            if rank == 1:
                assert isinstance(error, OSError)
            else:
                assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
                assert str(error) == "rank 1 could not build the Fleet: OSError: the disk is on fire"
    check_results(problem, params, [y for _, y in by_rank])


@pytest.mark.parametrize("exchange", [0, 2])
def test_a_rank_that_is_killed(ranks: Ranks, exchange: int) -> None:
    if ranks.device != "cpu" and exchange:
        pytest.skip("ranks on GPUs have less to exchange")
    problem = ranks.problem([3, 0, 4])
    params = ranks.params(problem, EpLayout.EXPERT_MAJOR)
    results = ranks.outcomes(stumbles, params, problem, [exchange], gone)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in {*range(ranks.world)} - {1}:
        assert results[rank].error is None, results[rank].error
        (error,), _ = results[rank].value
        assert isinstance(error, MoEEpPeerError) and error.rank == 1, error
        assert "ended" in error.reason
