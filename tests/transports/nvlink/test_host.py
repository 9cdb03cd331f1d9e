"""What the transport does on the host alone: sizes, steps, error words, and what it says without a GPU."""

from __future__ import annotations

import pytest
import torch

from moefleet import EpAlgorithm, EpLayout, FleetParams, MoEEpConfigError, NVLinkConfig, Placement, probe
from moefleet.transports.nvlink import memory_bytes
from moefleet.transports.nvlink.alarm import STICKY, Trouble, to_error, trouble_in
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


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_regions_do_not_overlap(layout: EpLayout) -> None:
    high = layout is EpLayout.FLAT
    params = FleetParams(
        7, 5, 3, 4, EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY, layout, max_topk=3
    )
    placement = Placement.contiguous(7, 3)
    shared = {Geometry.of(params, placement, rank).shared for rank in range(3)}
    assert len(shared) == 1, "peers compute one another's addresses"
    places = next(iter(shared))
    starts = sorted(set(places[3:]))
    assert starts[0] == 0 and all(start % 128 == 0 for start in starts)
    assert places.set_bytes >= places.rows + 3 * 5 * 3 * 4
    assert (places.rows == places.back) == high


@pytest.mark.parametrize("trouble", list(Trouble), ids=lambda trouble: trouble.name)
def test_error_words(trouble: Trouble) -> None:
    word = trouble + (3 << 8) + (123456789 << 24)
    assert trouble_in(word) is trouble
    error = to_error(word, 5, 2.5)
    assert "rank 3" in str(error)
    assert ("2.5 s" in str(error)) == (trouble in STICKY)


def test_steps() -> None:
    told: list[object] = []
    steps = Steps(told.append)
    a, b = steps.begin(), steps.begin()
    assert {steps.output_of(a), steps.output_of(b)} == {0, 1}
    with pytest.raises(MoEEpConfigError, match="at most 2 steps"):
        steps.begin()
    steps.fail_next(ValueError())
    assert told == []  # the step that was refused is no step
    steps.sent(steps.output_of(a), "slot a")
    steps.fail(a, "why")
    steps.fail(a, "again")
    assert told == ["slot a"]
    c = steps.begin()
    assert {steps.output_of(b), steps.output_of(c)} == {0, 1}
    steps.close(b)
    steps.close(c)
    steps.fail_next(ValueError())
    assert told == ["slot a", None]
    assert steps.begun == 3


def test_config() -> None:
    with pytest.raises(MoEEpConfigError, match=r"NVLinkConfig\.programs"):
        NVLinkConfig(programs=0)
    with pytest.raises(MoEEpConfigError, match=r"NVLinkConfig\.senders"):
        NVLinkConfig(programs=4, senders=5)
