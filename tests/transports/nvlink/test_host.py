"""What the transport does on the host alone: sizes, steps, error words, and what it says without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefleet import (
    EpAlgorithm,
    EpLayout,
    FleetAlgoKnobQuantization,
    FleetParams,
    MoEEpConfigError,
    NVLinkConfig,
    Placement,
    probe,
)
from moefleet.knobs import FleetAlgoKnob
from moefleet.transports.nvlink import memory_bytes
from moefleet.transports.nvlink.alarm import TIMEOUTS, Trouble, to_error, trouble_in
from moefleet.transports.nvlink.geometry import Geometry
from moefleet.transports.nvlink.steps import Steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_probe_says_why_not() -> None:
    capability = probe("nvlink")
    assert not capability.available
    assert capability.reason == "no CUDA GPU"
    assert capability.limits is not None and capability.limits.layouts == frozenset(EpLayout)


def test_high_throughput_memory_is_bounded() -> None:
    params = FleetParams(256, 4096, 7168, algorithm=EpAlgorithm.HIGH_THROUGHPUT, max_topk=8)
    sizes = memory_bytes(params, 8)
    assert sizes["total"] == sizes["shared"] + sizes["output"] + sizes["private"]
    assert sizes["total"] < 2e9


FP8 = (FleetAlgoKnobQuantization(frozenset({"FP8E4M3"})),)


def test_scales_take_memory() -> None:
    """Two sets of scales in shared memory and in what experts read; rows of fp8 there, of two bytes back."""
    world, most, hidden = 2, 8, 256
    params = FleetParams(4, most, hidden, layout=EpLayout.RANK_MAJOR, max_topk=2)
    plain = memory_bytes(params, world)
    scaled = memory_bytes(replace(params, scale_bytes_per_token=8), world)
    quantised = memory_bytes(params, world, algo_knobs=FP8)
    brought = memory_bytes(replace(params, dtype_bytes=1, scale_bytes_per_token=8), world)
    rows = 2 * world * most  # of both sets
    for kind in ("shared", "output"):
        assert scaled[kind] - plain[kind] == rows * 8
        assert quantised[kind] - plain[kind] == rows * (8 - hidden)
        assert quantised[kind] == brought[kind]
    flat = replace(params, algorithm=EpAlgorithm.HIGH_THROUGHPUT, layout=EpLayout.FLAT)
    assert memory_bytes(flat, world, algo_knobs=FP8)["shared"] - memory_bytes(flat, world)["shared"] == rows * 8


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
@pytest.mark.parametrize("knobs", [(), FP8], ids=["plain", "fp8"])
def test_regions_do_not_overlap(layout: EpLayout, knobs: tuple[FleetAlgoKnob, ...]) -> None:
    high = layout is EpLayout.FLAT
    params = FleetParams(
        7, 5, 3, 4, EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY, layout, max_topk=3
    )
    placement = Placement.contiguous(7, 3)
    shared = {Geometry.of(params, placement, rank, knobs).shared for rank in range(3)}
    assert len(shared) == 1, "peers compute one another's addresses"
    places = next(iter(shared))
    starts = sorted(set(places[places._fields.index("head_flag") :]))
    assert starts[0] == 0 and all(start % 128 == 0 for start in starts)
    assert places.set_bytes >= places.rows + 3 * 5 * 3 * 4
    assert (places.rows == places.back) == high
    assert places.region == (5 if not (high and knobs) else 4 * 5), "a source's rows stay in its own part"


@pytest.mark.parametrize("trouble", list(Trouble), ids=lambda trouble: trouble.name)
def test_error_words(trouble: Trouble) -> None:
    word = trouble + (3 << 8) + (123456789 << 24)
    assert trouble_in(word) is trouble
    error = to_error(word, 5, 2.5)
    assert "rank 3" in str(error)
    assert ("2.5 s" in str(error)) == (trouble in TIMEOUTS)


def test_steps() -> None:
    told: list[tuple[object, str]] = []
    steps = Steps(lambda slot, error: told.append((slot, str(error))))
    a, b = steps.begin(), steps.begin()
    assert {steps.output_of(a), steps.output_of(b)} == {0, 1}
    with pytest.raises(MoEEpConfigError, match="at most 2 steps"):
        steps.begin()
    steps.fail_next(ValueError("refused"))
    assert told == []  # the step that was refused is no step
    steps.sent(steps.output_of(a), "slot a")
    assert steps.open == [a, b] and steps.open_slots == ["slot a"]  # what a Fleet fails when it is destroyed
    steps.fail(a, "why")
    steps.fail(a, "again")
    assert told == [("slot a", "why")]
    c = steps.begin()
    assert {steps.output_of(b), steps.output_of(c)} == {0, 1}
    steps.close(b)
    steps.close(c)
    steps.fail_next(ValueError("too many"))
    assert told == [("slot a", "why"), (None, "too many")]


def test_a_step_waits_for_the_one_before_last() -> None:
    """Steps s and s + 2 share a buffer set, whatever became of s + 1."""
    steps = Steps(lambda slot, error: None)
    first, second = steps.begin(), steps.begin()
    steps.close(second)
    with pytest.raises(MoEEpConfigError, match="step 1 of 2 is not combined"):
        steps.begin()
    steps.close(first)
    third = steps.begin()
    steps.fail_next(ValueError())  # step 4, which no handle has
    with pytest.raises(MoEEpConfigError, match="step 3 of 4 is not combined"):
        steps.begin()
    steps.close(third)


def test_config() -> None:
    with pytest.raises(MoEEpConfigError, match=r"NVLinkConfig\.programs"):
        NVLinkConfig(programs=0)
    with pytest.raises(MoEEpConfigError, match=r"NVLinkConfig\.senders"):
        NVLinkConfig(programs=4, senders=5)
