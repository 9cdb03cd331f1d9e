"""What is measured: routing that all ranks can derive, and the bytes that it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefleet.bench.cases import ROUTINGS, CommCase, Routing, payload
from moefleet.config import EpLayout
from moefleet.errors import MoEEpConfigError
from moefleet.placement import Placement

CASE = CommCase(world=3, tokens=5, hidden=16, experts=7, topk=2)


@pytest.mark.parametrize("routing", list(Routing))
def test_routing_is_distinct_repeatable_and_new_in_each_step(routing: Routing) -> None:
    case = replace(CASE, routing=routing)
    seen = {str(case.routed(rank, number)[0].tolist()) for rank in range(3) for number in range(ROUTINGS)}
    assert len(seen) == 3 * ROUTINGS
    ids, weights = case.routed(1, 4)
    assert torch.equal(ids, case.routed(1, 4)[0])
    assert all(len(set(row)) == 2 and set(row) <= set(range(7)) for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(5))


def test_zipf_prefers_the_first_experts() -> None:
    many = replace(CASE, tokens=2000)
    uniform, zipf = (
        torch.bincount(replace(many, routing=routing).routed(0, 0)[0].flatten(), minlength=7) for routing in Routing
    )
    assert uniform.min() > 0.8 * uniform.max()
    assert zipf.tolist() == sorted(zipf.tolist(), reverse=True)
    assert zipf[0] > 2 * zipf[6]


@pytest.mark.parametrize("case", [CASE, replace(CASE, tokens=0), replace(CASE, topk=7, dtype=torch.bfloat16)])
def test_bytes_count_a_row_for_each_token_and_other_rank(case: CommCase) -> None:
    owner_of = Placement.contiguous(case.experts, case.world).owner_of
    there, back = [0.0] * case.world, [0.0] * case.world
    for number in range(ROUTINGS):
        for rank in range(case.world):
            for ids in case.routed(rank, number)[0].tolist():
                for owner in {owner_of(expert) for expert in ids} - {rank}:
                    there[rank] += 1 / ROUTINGS
                    back[owner] += 1 / ROUTINGS
    row = case.hidden * case.dtype.itemsize
    moved = payload(case)
    for phase, rows in (("dispatch", there), ("combine", back), ("both", [a + b for a, b in zip(there, back)])):
        assert moved[phase].mean == pytest.approx(sum(rows) / case.world * row, abs=0.51)
        assert moved[phase].most == pytest.approx(max(rows) * row, abs=0.51)


def test_nothing_crosses_in_a_world_of_one() -> None:
    assert {(p.mean, p.most) for p in payload(replace(CASE, world=1)).values()} == {(0, 0)}


@pytest.mark.parametrize(
    ("change", "field"), [({"tokens": -1}, "tokens"), ({"topk": 8}, "topk"), ({"hidden": 0}, "hidden")]
)
def test_bad_values_are_named(change: dict[str, int], field: str) -> None:
    with pytest.raises(MoEEpConfigError, match=field):
        replace(CASE, **change)


@pytest.mark.parametrize("layout", list(EpLayout))
def test_a_case_fits_its_fleet(layout: EpLayout) -> None:
    params = replace(CASE, layout=layout, tokens=0).params
    assert (params.resolved_layout, params.max_tokens_per_rank, params.dtype_bytes) == (layout, 1, 4)
