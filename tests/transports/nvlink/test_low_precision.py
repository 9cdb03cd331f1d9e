"""Scales that travel with rows, fp8 rows, and tokens encoded in flight, under Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    EpLayout,
    FleetAlgoKnobQuantization,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    quant,
    reference,
)
from tests.faults.engine import run
from tests.strategies import Problem, make_problem

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip(
        "kernels are compiled where there is a GPU: see benchmarks/gpu/check_nvlink.py", allow_module_level=True
    )

import triton
import triton.language as tl

from moefleet.transports.nvlink.alarm import Trouble, trouble_in
from moefleet.transports.nvlink.kernels.rows import Rows, encoded, to_e4m3
from tests.transports.nvlink.simulate import SPLIT_GRIDS, World

LAYOUTS = pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
FP8 = (FleetAlgoKnobQuantization(frozenset({"FP8E4M3"})),)


def bits(x: torch.Tensor) -> torch.Tensor:
    """For comparing numbers of one byte, NaN included."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def check_step(world: World, p: Problem, scales: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """One step with identity experts: what arrives, bit for bit, and what comes home, within the tolerance."""
    quantised, low = world.engines[0].geometry.rows.quantised, p.xs[0].itemsize == 1
    slots = world.update(p)
    got = world.dispatch(slots, p, scales=scales)
    want = reference.dispatch(p.xs, *p.routing, world.params, scales=scales, quantised=quantised, fill=math.nan)
    for mine, theirs in zip(got, want):
        for name in ("expert_counts", "recv_total_counter", "recv_topk_idx", "recv_topk_weights", "combine_dtype"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert a is b or torch.equal(a, b), (name, a, b)
        live = ~theirs.expert_tensors.float().isnan().any(-1)
        assert mine.expert_tensors.dtype == theirs.expert_tensors.dtype
        assert torch.equal(bits(mine.expert_tensors)[live], bits(theirs.expert_tensors)[live])
        assert mine.expert_scales is not None and theirs.expert_scales is not None
        assert mine.expert_scales.dtype == theirs.expert_scales.dtype
        assert torch.equal(bits(mine.expert_scales)[live], bits(theirs.expert_scales)[live])
    rows = [reference.compute(out, lambda x, index: x, fill=math.nan) for out in want]
    homes = world.combine(slots, p, rows)
    for y, e in zip(homes, reference.combine(rows, *p.routing, world.params)):
        assert e is not None and y.dtype == e.dtype == (torch.bfloat16 if low else p.xs[0].dtype)
        largest = 4 * max([1.0, *(float(r.nan_to_num().abs().max()) for r in rows if r.numel())])
        tolerance = reference.tolerance(y.dtype, p.world_size, p.topk, largest)
        assert torch.allclose(y.float(), e.float(), rtol=0, atol=tolerance)
    assert world.alarms() == [0] * p.world_size
    return homes


@LAYOUTS
@pytest.mark.parametrize("hidden, dtype", [(130, torch.bfloat16), (5, torch.float16), (4200, torch.float32)])
def test_tokens_are_encoded_in_flight(layout: EpLayout, hidden: int, dtype: torch.dtype) -> None:
    p = make_problem(hidden, 2, 3, hidden, 2, [3, 2], dtype)
    check_step(World(p.params(layout), 2, knobs=FP8), p)


@LAYOUTS
def test_bits_do_not_depend_on_where_an_expert_lives(layout: EpLayout) -> None:
    """A rank encodes its own rows as it does those for others."""
    alone = make_problem(3, 1, 2, 200, 2, [4], torch.bfloat16, "distinct")
    idle = torch.empty(0, 200, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    x, ids, weights = alone.xs[0], alone.topk_ids[0], alone.topk_weights[0]
    apart = Problem(2, 2, 200, 2, (idle[0], x), (idle[1], ids), (idle[2], weights))  # expert 0 is the other rank's
    got = [World(p.params(layout), p.world_size, knobs=FP8) for p in (alone, apart)]
    outs = [world.dispatch(world.update(p), p) for world, p in zip(got, (alone, apart))]
    want = quant.encode(x)
    for out in (*outs[0], *outs[1]):
        rows, scales = out.expert_tensors.view(torch.uint8).flatten(0, -2), out.expert_scales
        assert scales is not None
        here = int(out.get_num_tokens())
        block = out.expert_tensors.shape[-2]  # of experts or ranks; each has all tokens in it, or none
        starts = [0] if layout is EpLayout.FLAT else [i * block for i, n in enumerate(out.expert_counts) if n]
        assert here == 4 * len(starts)
        for start in starts:
            assert torch.equal(rows[start : start + 4], want[0].view(torch.uint8))
            assert torch.equal(scales.flatten(0, -2)[start : start + 4], want[1])


@LAYOUTS
def test_senders_and_receivers_apart(layout: EpLayout) -> None:
    p = make_problem(4, 3, 7, 140, 2, [2, 3, 1], torch.bfloat16)
    check_step(World(p.params(layout), 3, grids=SPLIT_GRIDS, knobs=FP8, staged=True), p)


def test_encoding_reads_strides() -> None:
    p = make_problem(5, 2, 3, 130, 2, [3, 2], torch.bfloat16)
    wide = [torch.zeros(len(x), 400, dtype=x.dtype) for x in p.xs]
    for w, x in zip(wide, p.xs):
        w[:, 3:263:2] = x
    strided = Problem(2, 3, 130, 2, tuple(w[:, 3:263:2] for w in wide), p.topk_ids, p.topk_weights)
    check_step(World(p.params(), 2, knobs=FP8), strided)


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    p = make_problem(6, 2, 2, 200, 1, [2, 2], torch.float32, "one_expert")
    p.xs[1][0, 150], p.xs[1][1, 3] = math.inf, math.nan
    world = World(p.params(), 2, knobs=FP8)
    rows, scales = (part[0, :4] for part in _rows_of(world.dispatch(world.update(p), p)[1]))
    assert torch.equal(quant.decode(rows, scales).isnan(), quant.decode(*quant.encode(torch.cat(p.xs))).isnan())
    assert torch.equal(rows.view(torch.uint8), quant.encode(torch.cat(p.xs))[0].view(torch.uint8))


def _rows_of(out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return out.expert_tensors, out.expert_scales


@LAYOUTS
def test_fp8_rows_with_scales_of_their_own(layout: EpLayout) -> None:
    p = make_problem(7, 3, 5, 300, 3, [3, 0, 4], torch.bfloat16)
    xs, scales = zip(*map(quant.encode, p.xs))
    low = Problem(3, 5, 300, 3, xs, p.topk_ids, p.topk_weights)
    check_step(World(p.params(layout, dtype_bytes=1, scale_bytes_per_token=12), 3), low, list(scales))


@pytest.mark.parametrize(
    "layout, dtype",
    [
        (EpLayout.EXPERT_MAJOR, torch.float32),
        (EpLayout.EXPERT_MAJOR, torch.float8_e8m0fnu),
        (EpLayout.RANK_MAJOR, torch.bfloat16),
        (EpLayout.RANK_MAJOR, torch.uint8),
        (EpLayout.FLAT, torch.float64),
        (EpLayout.FLAT, torch.int32),
    ],
    ids=str,
)
def test_scales_travel_with_their_tokens(layout: EpLayout, dtype: torch.dtype) -> None:
    p = make_problem(8, 2, 5, 6, 3, [4, 3])
    g = torch.Generator().manual_seed(1)
    scales = [torch.randint(1, 120, (count, 3), generator=g).to(dtype) for count in p.tokens]
    padded = [torch.cat([s.repeat_interleave(2, 1), s], 1)[:, :6:2] for s in scales]  # strides of rows and columns
    assert all(torch.equal(a, b) and a.stride() == (9, 2) for a, b in zip(map(bits, padded), map(bits, scales)))
    check_step(World(p.params(layout, scale_bytes_per_token=3 * dtype.itemsize), 2), p, padded)


def test_many_scales() -> None:
    p = make_problem(9, 2, 3, 4, 2, [2, 2])
    scales = [torch.randn(count, 1500) for count in p.tokens]
    check_step(World(p.params(EpLayout.RANK_MAJOR, scale_bytes_per_token=6000), 2), p, scales)


def test_scales_of_another_type_on_one_rank() -> None:
    p = make_problem(10, 2, 4, 4, 2, [3, 3], special="distinct")
    world = World(p.params(scale_bytes_per_token=8), 2)
    world.dispatch(world.update(p), p, scales=[torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)])
    assert [trouble_in(word) for word in world.alarms()] == [Trouble.MISMATCH] * 2


@triton.jit
def _encode_rows(x, rows, scales, H: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0)
    cols, codes, block, scale = encoded(x + row * H, 1, 0, H, R)
    tl.store(rows + row * H + cols, codes, mask=cols < H)
    tl.store(scales + row * R.scales + block, scale, mask=block < R.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_encode_as_torch_does(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(24, 300, generator=g) * 10.0 ** torch.empty(24, 1).uniform_(-44, 38, generator=g)
    x *= 10.0 ** torch.empty(24, 300).uniform_(-6, 0, generator=g)
    x[0, :5] = torch.tensor([0.0, -0.0, math.inf, math.nan, 1.0])
    x = x.to(dtype)
    if dtype is torch.bfloat16:  # the interpreter reads subnormal ones wrongly
        x[x.abs() < 2.0**-126] = 0
    rows, scales = torch.zeros(24, 300, dtype=torch.uint8), torch.zeros(24, 3)
    _encode_rows[(24,)](x, rows, scales, 300, Rows(True, False, 512, 3, 4))
    want_rows, want_scales = quant.encode(x)
    assert torch.equal(rows, want_rows.view(torch.uint8)) and torch.equal(scales, want_scales)


@triton.jit
def _to_e4m3(x, codes, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes + at, to_e4m3(tl.load(x + at), False))


def test_every_number_and_every_tie_rounds_as_torch_does() -> None:
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (finite[1:] + finite[:-1]) / 2
    around = [torch.nextafter(between, torch.tensor(far)) for far in (0.0, 1e3)]
    x = torch.cat([finite, between, *around, torch.tensor([1e-45, 1e-38, 2.0**-11, 448.0001])])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, -len(x) % 256))
    codes = torch.zeros(len(x), dtype=torch.uint8)
    _to_e4m3[(len(x) // 256,)](x, codes, 256)
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


def through_layers(bootstrap: BootstrapConfig, problem: Problem) -> list[torch.Tensor]:
    """Gated experts over whole Fleets, in every layout: tokens that the transport encodes, and that this rank does."""
    from tests.transports.nvlink.pretend import CONFIG, pretend

    pretend()
    rank, ys = bootstrap.rank, []
    x, ids, weights = problem.xs[rank], problem.topk_ids[rank], problem.topk_weights[rank]
    rows, scales = quant.encode(x)
    padded = torch.cat([scales.repeat_interleave(2, 1), scales], 1)[:, : 2 * scales.shape[1] : 2]
    w13, w2 = (plane.chunk(2)[rank] for plane in problem.weights(24))
    for layout in EpLayout:
        for knobs, changes, given in (
            (FP8, {}, (x, None)),
            ((), {"dtype_bytes": 1, "scale_bytes_per_token": 8}, (rows, padded)),
        ):
            params = problem.params(layout, **changes)
            with MoEEpLayer(bootstrap, params, MoEWeightPack(w13, w2), knobs, CONFIG) as layer:
                for _ in range(2):  # the second is of a kind that was bound
                    y = layer(MoEEpTensors(given[0], ids, weights, scales=given[1]))
                ys.append(y)
    return ys


def test_layers_over_whole_fleets() -> None:
    p = make_problem(11, 2, 4, 160, 2, [3, 2], torch.bfloat16)
    want = reference.forward(p.xs, *p.routing, *p.weights(24), quantised=True)
    for value, answer in zip(run(through_layers, p, world=2, timeout_s=100), want):
        assert answer is not None and len(value) == 6
        for y in value:
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y.double(), answer, rtol=0, atol=2.0**-5 * max(1.0, float(answer.abs().max())))
        assert all(torch.equal(a, b) for a, b in zip(value[::2], value[1::2]))
