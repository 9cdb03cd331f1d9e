"""torch's modes: engines run some steps in inference mode and others outside it, over one Fleet."""

from __future__ import annotations

import torch

from moefleet import EpLayout, FleetParams
from tests.conformance.comparing import check_results
from tests.conformance.context import RankContext, step
from tests.conformance.ranks import Ranks
from tests.strategies import Problem


def in_and_out(ctx: RankContext, params: FleetParams, problem: Problem, built_inside: bool) -> list[torch.Tensor]:
    """The same step five times: both buffer sets are used in inference mode, and then outside it."""
    with torch.inference_mode(built_inside):
        fleet = ctx.fleet(params)
    results = []
    for inside in (True, True, False, False, True):
        with torch.inference_mode(inside), torch.no_grad():
            results.append(step(fleet, *ctx.mine(problem))[1].clone())
    return results


def test_inference_mode_comes_and_goes(ranks: Ranks, layout: EpLayout) -> None:
    problem = ranks.problem([3, 0, 2])
    params = ranks.params(problem, layout)
    for built_inside in (False, True):
        by_rank = ranks(in_and_out, params, problem, built_inside)
        for results in zip(*by_rank, strict=True):
            check_results(problem, params, list(results))
