"""Limits as data: what a transport cannot serve is refused by name, with both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet import EpAlgorithm, EpLayout, FleetAlgoKnobQuantization, FleetParams, Limits, MoEEpConfigError
from moefleet.fleet import check_limits

CPU, META = torch.device("cpu"), torch.device("meta")
ROOMY = Limits(device_types=frozenset({"cpu"}), layouts=frozenset(EpLayout))
PARAMS = FleetParams(8, 16, 96, scale_bytes_per_token=4, max_topk=6)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device_types": frozenset({"meta", "cuda"})}, "device: got cpu, allowed cuda or meta"),
    (
        {"layouts": frozenset({EpLayout.FLAT, EpLayout.RANK_MAJOR})},
        "layout: got EXPERT_MAJOR, allowed FLAT or RANK_MAJOR",
    ),
    ({"dtype_bytes": frozenset({1, 4})}, "dtype_bytes: got 2, allowed 1 or 4"),
    ({"max_world_size": 2}, "world_size: got 3, allowed at most 2"),
    ({"max_topk": 5}, "max_topk: got 6, allowed at most 5"),
    ({"max_tokens_per_rank": 15}, "max_tokens_per_rank: got 16, allowed at most 15"),
    ({"max_hidden": 95}, "token_hidden_size: got 96, allowed at most 95"),
    ({"hidden_multiple": 64}, "token_hidden_size: got 96, allowed a multiple of 64; pad the rows"),
    ({"hidden_sizes": frozenset({128, 64})}, r"token_hidden_size: got 96, allowed \[64, 128\]; pad the rows"),
    ({"experts_divisible": True}, "num_experts: got 8 over 3 ranks, allowed a multiple of 3"),
    ({"scales": False}, "scale_bytes_per_token: got 4, allowed 0"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_what_is_out_of_bounds_is_refused(change: dict[str, Any], message: str) -> None:
    check_limits("some", ROOMY, PARAMS, 3, CPU)
    with pytest.raises(MoEEpConfigError, match=f"^some: {message}"):
        check_limits("some", replace(ROOMY, **change), PARAMS, 3, CPU)


def test_bounds_themselves_are_inside() -> None:
    tight = replace(
        ROOMY, max_world_size=2, max_topk=6, max_tokens_per_rank=16, max_hidden=96, hidden_multiple=96,
        hidden_sizes=frozenset({96}), experts_divisible=True,
    )  # fmt: skip
    check_limits("some", tight, PARAMS, 2, CPU)


def test_scales_are_refused_only_where_they_are_asked_for() -> None:
    check_limits("some", replace(ROOMY, scales=False), replace(PARAMS, scale_bytes_per_token=0), 2, CPU)


def test_the_layout_is_the_one_in_force() -> None:
    flat_only = replace(ROOMY, layouts=frozenset({EpLayout.FLAT}))
    check_limits("some", flat_only, FleetParams(8, 16, 96, algorithm=EpAlgorithm.HIGH_THROUGHPUT), 2, CPU)


QUANTS = replace(ROOMY, quants=frozenset({"FP8E4M3"}))
PLAIN = replace(PARAMS, scale_bytes_per_token=0)


@pytest.mark.parametrize(
    "limits, params, quants, message",
    [
        (ROOMY, PLAIN, {"FP8E4M3"}, r"FleetAlgoKnobQuantization\.quants: got \{'FP8E4M3'\}, allowed rows as they are"),
        (QUANTS, PLAIN, {"NVFP4"}, r"FleetAlgoKnobQuantization\.quants: got \{'NVFP4'\}, allowed \{'FP8E4M3'\}"),
        (QUANTS, PLAIN, {"FP8E4M3", "NVFP4"}, r"FleetAlgoKnobQuantization\.quants: got \{'FP8E4M3', 'NVFP4'\}"),
        (QUANTS, PLAIN, set(), r"FleetAlgoKnobQuantization\.quants: got \{\}, allowed"),
        (QUANTS, PARAMS, {"FP8E4M3"}, "scale_bytes_per_token with FleetAlgoKnobQuantization: got 4, allowed 0"),
        (
            replace(QUANTS, dtype_bytes=frozenset({1})),
            replace(PLAIN, dtype_bytes=1),
            {"FP8E4M3"},
            "dtype_bytes with FleetAlgoKnobQuantization: got 1, allowed 2 or 4",
        ),
    ],
)
def test_formats_in_flight(limits: Limits, params: FleetParams, quants: set[str], message: str) -> None:
    knob = FleetAlgoKnobQuantization(frozenset(quants))
    check_limits("some", QUANTS, PLAIN, 2, CPU, [FleetAlgoKnobQuantization(frozenset({"FP8E4M3"}))])
    with pytest.raises(MoEEpConfigError, match=f"^some: {message}"):
        check_limits("some", limits, params, 2, CPU, [knob])
