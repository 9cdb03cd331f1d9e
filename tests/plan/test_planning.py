"""A whole plan: shares, fits, advice, warnings. Surroundings are made up, so that no test depends on its machine."""

from __future__ import annotations

import json

import pytest

from moefleet import Capability, EpLayout, Limits
from moefleet.errors import MoEEpConfigError
from moefleet.plan import Checkpoint, ModelShape, Surroundings, look, make_plan
from moefleet.plan.fit import Fit
from moefleet.plan.planning import Plan
from moefleet.plan.words import in_bytes, in_count, in_ranks, in_rows

GIB = 2**30
LAYOUTS = frozenset(EpLayout)
TRANSPORTS = {
    "nvlink": Capability(False, "no CUDA GPU", limits=Limits(frozenset({"cuda"}), LAYOUTS, max_world_size=4)),
    "shm": Capability(True, limits=Limits(frozenset({"cpu"}), LAYOUTS)),
    "torch_dist": Capability(True, limits=Limits(frozenset({"cpu", "cuda"}), LAYOUTS)),
    "theirs": Capability(True),
}
PLENTY = Surroundings(TRANSPORTS, host_bytes=1000 * GIB)
SHAPE = ModelShape("model", 10, 2, 256, 128, 4, 3, "bfloat16", dense_parameters=1000)
EACH = 3 * 256 * 128 * 2 * 3  # bytes of an expert over three MoE layers


def fit_of(plan: Plan, transport: str, layout: EpLayout = EpLayout.EXPERT_MAJOR) -> Fit:
    (found,) = (each for each in plan.layouts if each.params.layout is layout)
    return next(one for one in found.fits if one.transport == transport)


def test_shares_are_those_of_the_placement() -> None:
    plan = make_plan(SHAPE, 4, PLENTY)
    assert [(r.first, r.count) for r in plan.ranks] == [(0, 3), (3, 3), (6, 2), (8, 2)]
    assert [r.expert_bytes for r in plan.ranks] == [3 * EACH, 3 * EACH, 2 * EACH, 2 * EACH]
    assert {r.dense_bytes for r in plan.ranks} == {2000}
    assert any("10 experts do not divide by 4 ranks: some hold 3, some 2" in text for text in plan.warnings)


def test_a_checkpoint_says_what_each_expert_takes() -> None:
    checkpoint = Checkpoint(tuple(range(10)), 50, unused_bytes=2048)
    plan = make_plan(SHAPE, 2, PLENTY, checkpoint=checkpoint)
    assert [r.expert_bytes for r in plan.ranks] == [10, 35]
    assert [r.total_bytes for r in plan.ranks] == [60, 85]
    assert plan.weights_from == "checkpoint"
    assert any("2.0 KiB of the checkpoint belong to layers beyond" in note for note in plan.notes)


def test_ranks_without_experts_are_told() -> None:
    plan = make_plan(SHAPE, 12, PLENTY)
    assert plan.ranks[-1].count == plan.ranks[-1].expert_bytes == 0
    assert any(text.startswith("ranks 10-11 of 12 get no expert") for text in plan.warnings)


def test_limits_and_probes_are_reasons() -> None:
    plan = make_plan(SHAPE, 2, PLENTY, tokens=8)
    assert fit_of(plan, "shm").fits and fit_of(plan, "shm").here and not fit_of(plan, "shm").reason
    assert (fit_of(plan, "nvlink").fits, fit_of(plan, "nvlink").here) == (True, False)
    assert fit_of(plan, "nvlink").reason == "no CUDA GPU"
    assert fit_of(plan, "theirs").memory is None and fit_of(plan, "theirs").fits
    wide = fit_of(make_plan(SHAPE, 8, PLENTY, tokens=8), "nvlink")
    assert not wide.fits and "world_size: got 8, allowed at most 4" in wide.reason and wide.memory is None


def test_memory_is_shared_by_the_ranks_of_a_host_and_not_by_gpus() -> None:
    around = Surroundings(TRANSPORTS, host_bytes=80, gpu_bytes=50)
    assert (around.for_each("cpu", 8), around.for_each("cuda", 8)) == (10, 50)
    assert Surroundings(TRANSPORTS, 80, 50, rank_bytes=7).for_each("cpu", 8) == 7
    plan = make_plan(SHAPE, 2, around, tokens=8)
    assert [fit_of(plan, name).device_type for name in TRANSPORTS] == ["cuda", "cpu", "cuda", "cpu"]


def test_weights_that_do_not_fit() -> None:
    plan = make_plan(SHAPE, 2, Surroundings(TRANSPORTS, host_bytes=2 * EACH), tokens=8)
    found = fit_of(plan, "shm")
    assert not found.fits and found.short_bytes > 4 * EACH
    assert found.reason.startswith("needs ") and found.reason.endswith("on each rank, 576.0 KiB available")
    (warning,) = (text for text in plan.warnings if text.startswith("weights alone take"))
    assert "576.0 KiB (this host's, shared by 2 ranks)" in warning
    assert "do not bound" not in warning and "use more or larger hosts" in warning
    assert all("does not bound this" in each.reason for each in plan.advice)


def test_a_fleet_that_does_not_fit_beside_the_weights() -> None:
    room = 5 * EACH + 2000 + 100_000
    plan = make_plan(SHAPE, 2, Surroundings(TRANSPORTS, rank_bytes=room), tokens=512, layouts=[EpLayout.EXPERT_MAJOR])
    found = fit_of(plan, "shm")
    assert found.memory is not None
    assert found.short_bytes == found.memory.at_start - 100_000
    assert any(text.startswith("shm, expert_major: a Fleet takes") for text in plan.warnings)
    assert fit_of(plan, "torch_dist").fits
    assert any(text.startswith("torch_dist, expert_major: a Fleet may grow to") for text in plan.warnings)


def test_advice_without_want_of_memory() -> None:
    decode, rank_major, prefill = make_plan(SHAPE, 2, PLENTY).advice
    assert (decode.purpose, decode.tokens, rank_major.tokens) == ("decode", 128, 128)
    assert (prefill.purpose, prefill.layout, prefill.tokens) == ("prefill", EpLayout.FLAT, 512)
    assert "An expert gets 51.2 rows on average" in decode.reason
    many = ModelShape("many", 512, 2, 256, 128, 1, 1)
    assert make_plan(many, 4, PLENTY, layouts=[EpLayout.FLAT]).advice[0].tokens == 8192  # 128 rows * 512 / (4 * 2)
    assert make_plan(many, 8, PLENTY, layouts=[EpLayout.FLAT]).advice[0].tokens == 4096


def test_advice_is_halved_until_the_fleet_is_small() -> None:
    plan = make_plan(SHAPE, 2, Surroundings(TRANSPORTS, host_bytes=2 * (5 * EACH + 2000 + 2_000_000)))
    decode = plan.advice[0]
    assert 1 <= decode.tokens < 128 and "halved from 128 to stay within 10%" in decode.reason
    found = fit_of(plan, "shm").memory
    assert found is not None and found.at_start <= 200_000
    assert plan.layouts[0].params.max_tokens_per_rank == decode.tokens


def test_for_another_machine_the_largest_fleet_counts() -> None:
    plan = make_plan(SHAPE, 2, Surroundings(TRANSPORTS, rank_bytes=80 * GIB))
    assert "(nvlink)" in plan.advice[0].reason
    assert "(shm)" in make_plan(SHAPE, 2, PLENTY).advice[0].reason


def test_unknown_memory_is_no_obstacle() -> None:
    plan = make_plan(SHAPE, 2, Surroundings(TRANSPORTS))
    assert fit_of(plan, "shm").fits
    assert "How much memory there is, is unknown." in plan.advice[0].reason


def test_notes_say_what_is_not_known() -> None:
    plan = make_plan(ModelShape("m", 4, 2, 8, 8, 1, 1, quantized="fp8"), 2, PLENTY)
    assert plan.ranks[0].dense_bytes is None
    assert any("unknown and not counted" in note for note in plan.notes)
    assert any("stored as fp8; they are computed here as bfloat16" in note for note in plan.notes)


def test_json_is_plain() -> None:
    plan = make_plan(SHAPE, 2, PLENTY, tokens=8)
    found = json.loads(json.dumps(plan.as_json()))
    assert [each["layout"] for each in found["layouts"]] == ["expert_major", "rank_major", "flat"]
    first, flow = found["layouts"][0], plan.layouts[0].traffic
    assert first["bytes_of_all_layers"] == 3 * (flow.dispatch_bytes + flow.combine_bytes)
    assert first["fleet_params"]["max_topk"] == 2
    assert [each["transport"] for each in first["transports"]] == list(TRANSPORTS)


@pytest.mark.parametrize(("world", "tokens", "said"), [(0, 1, "plan world_size: got 0"), (1, 0, "plan tokens: got 0")])
def test_sizes_out_of_range(world: int, tokens: int, said: str) -> None:
    with pytest.raises(MoEEpConfigError, match=said):
        make_plan(SHAPE, world, PLENTY, tokens=tokens)


def test_this_machine_offers_our_transports() -> None:
    around = look(rank_bytes=5)
    assert {"nvlink", "shm", "torch_dist"} <= around.transports.keys()
    assert around.for_each("cpu", 3) == 5


def test_words() -> None:
    assert [in_bytes(n) for n in (0, 1023, 1536, 3 * GIB, 5000 * GIB)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "4.9 TiB",
    ]
    assert [in_count(n) for n in (12, 1500, 2.5e6, 671e9)] == ["12", "1.5 K", "2.5 M", "671.0 B"]
    assert [in_rows(n) for n in (1.25, 1234.5)] == ["1.2", "1,234"]
    assert [in_ranks(1, 1), in_ranks(0, 3)] == ["rank 1", "ranks 0-3"]
