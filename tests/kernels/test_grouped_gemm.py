"""Gated experts in the three layouts against a float64 reference, with everything that nobody wrote poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefleet import reference
from moefleet.config import EpAlgorithm, EpLayout, FleetParams, GroupedGemmConfig
from moefleet.errors import MoEEpConfigError
from moefleet.kernels import get_kernel, grouped_gemm
from moefleet.kernels.grouped_gemm import ACTIVATIONS, each_expert, grouped_experts, takes_grouped_mm
from moefleet.tensors import DispatchOutput
from moefleet.weights import MoEWeightPack, UnquantizedMoEWeights
from tests.strategies import make_problem

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = tuple(EpLayout)
BY_TOKEN = (EpLayout.RANK_MAJOR, EpLayout.FLAT)
H, I, L, K = 16, 24, 3, 4  # noqa: E741
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def make_weights(dtype: torch.dtype, experts: int = L, hidden: int = H, inter: int = I) -> UnquantizedMoEWeights:
    g = torch.Generator().manual_seed(7)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g) / hidden**0.5
    w2 = torch.randn(experts, hidden, inter, generator=g) / inter**0.5
    return UnquantizedMoEWeights(w13.to(dtype), w2.to(dtype))


def received(
    layout: EpLayout,
    dtype: torch.dtype = torch.float32,
    *,
    counts: tuple[int, ...] = (2, 0, 7),
    experts: int = L,
    hidden: int = H,
    poison: float = NAN,
    seed: int = 0,
) -> DispatchOutput:
    """Blocks of capacity 8 with ``counts`` rows (FLAT: one block of their sum). Ids repeat and leave ``[0, L)``.

    Past the counts: poison in rows and weights, and ids that look valid.
    """
    g = torch.Generator().manual_seed(seed)
    if layout is EpLayout.FLAT:
        counts = (sum(counts),)
    capacity = max(8, *counts)
    rows = torch.randn(len(counts), capacity, hidden, generator=g)
    ids = torch.randint(-2, experts + 2, (len(counts), capacity, K), generator=g)
    weights = torch.randn(len(counts), capacity, K, generator=g)
    past = torch.arange(capacity) >= torch.tensor(counts)[:, None]
    rows[past], weights[past], ids[past] = poison, poison, 0
    rows, counted = rows.to(dtype), torch.tensor(counts, dtype=torch.int32)
    if layout is EpLayout.EXPERT_MAJOR:
        return DispatchOutput(rows, expert_counts=counted)
    if layout is EpLayout.RANK_MAJOR:
        return DispatchOutput(rows, ids, weights, expert_counts=counted)
    return DispatchOutput(rows[0], ids[0], weights[0], recv_total_counter=counted)


def existing(out: DispatchOutput, plane: torch.Tensor) -> torch.Tensor:
    """``[rows, ...]`` of a plane that the counts say exist, block after block."""
    counts = out.recv_total_counter if out.expert_counts is None else out.expert_counts
    assert counts is not None
    blocks = plane.unsqueeze(0) if out.expert_counts is None else plane
    return torch.cat([block[:count] for block, count in zip(blocks, counts.tolist())])


def expected(out: DispatchOutput, weights: UnquantizedMoEWeights, activation: str = "silu") -> torch.Tensor:
    """float64 ``[rows, H]`` of the rows that exist, one pair at a time."""

    def mlp(x_H: torch.Tensor, expert: int) -> torch.Tensor:
        return reference.expert_mlp(x_H[None], weights.w13[expert], weights.w2[expert], activation)[0]

    x = existing(out, out.expert_tensors)
    y = torch.zeros_like(x, dtype=torch.float64)
    if out.recv_topk_idx is None:
        assert out.expert_counts is not None
        expert_of_row = [expert for expert, count in enumerate(out.expert_counts.tolist()) for _ in range(count)]
        return torch.stack([mlp(row, expert) for row, expert in zip(x, expert_of_row)]) if len(x) else y
    assert out.recv_topk_weights is not None
    ids, factors = existing(out, out.recv_topk_idx), existing(out, out.recv_topk_weights)
    for row in range(len(x)):
        for expert, factor in zip(ids[row].tolist(), factors[row].tolist()):
            if 0 <= expert < weights.num_local_experts:
                y[row] += factor * mlp(x[row], expert)
    return y


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    allowed = STEP[got.dtype] * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    assert (got.double() - want).abs().max().item() <= allowed if want.numel() else not got.numel()


def kernel(activation: str = "silu"):
    return get_kernel(GroupedGemmConfig(activation))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 10])  # 10 elements are no multiple of 16 bytes
def test_against_float64(layout: EpLayout, dtype: torch.dtype, hidden: int) -> None:
    weights, out = make_weights(dtype, hidden=hidden), received(layout, dtype, hidden=hidden)
    if dtype is not torch.float16:  # where it depends on the CPU
        assert takes_grouped_mm(weights) == (hidden == 16)
    result = kernel().compute(out, layout, weights)
    assert result.shape == out.expert_tensors.shape and result.dtype == dtype
    assert_close(existing(out, result), expected(out, weights))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(layout: EpLayout, activation: str) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    assert_close(existing(out, kernel(activation).compute(out, layout, weights)), expected(out, weights, activation))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_is_written_where_rows_exist_and_nowhere_else(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    into = torch.full_like(out.expert_tensors, 7.0)
    assert kernel().compute(out, layout, weights, into=into) is into
    assert torch.equal(existing(out, into), existing(out, kernel().compute(out, layout, weights)))
    assert (into == 7).sum() == into.numel() - existing(out, into).numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_may_be_the_rows_themselves(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    want = kernel().compute(out, layout, weights)
    kernel().compute(out, layout, weights, into=out.expert_tensors)
    assert torch.equal(existing(out, out.expert_tensors), existing(out, want))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_past_the_counts_changes_no_bit(layout: EpLayout) -> None:
    weights = make_weights(torch.float32)
    outs = [received(layout, poison=poison) for poison in (NAN, float("inf"), 0.0)]
    first, *others = [existing(out, kernel().compute(out, layout, weights)) for out in outs]
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_of_zero(layout: EpLayout, dtype: torch.dtype) -> None:
    weights, out = make_weights(dtype), received(layout, dtype, counts=(0, 0, 0))
    into = torch.full_like(out.expert_tensors, 7.0)
    assert (kernel().compute(out, layout, weights, into=into) == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_without_experts(layout: EpLayout) -> None:
    weights = make_weights(torch.float32, experts=0)
    if layout is EpLayout.EXPERT_MAJOR:
        out = DispatchOutput(torch.empty(0, 8, H), expert_counts=torch.empty(0, dtype=torch.int32))
    else:
        out = received(layout, experts=0)
    result = kernel().compute(out, layout, weights)
    assert result.shape == out.expert_tensors.shape
    assert existing(out, result).eq(0).all() if layout in BY_TOKEN else not result.numel()


@pytest.mark.parametrize("layout", BY_TOKEN)
def test_a_local_id_out_of_range_is_not_here(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    assert out.recv_topk_idx is not None
    outside = (out.recv_topk_idx < 0) | (out.recv_topk_idx >= L)
    assert outside.any()
    cleaned = replace(out, recv_topk_idx=torch.where(outside, -1, out.recv_topk_idx))
    a, b = (existing(o, kernel().compute(o, layout, weights)) for o in (out, cleaned))
    assert torch.equal(a, b)
    nowhere = replace(out, recv_topk_idx=torch.full_like(out.recv_topk_idx, L))
    assert existing(out, kernel().compute(nowhere, layout, weights)).eq(0).all()


@pytest.mark.parametrize("layout", BY_TOKEN)
def test_an_expert_named_twice_adds_up(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    assert out.recv_topk_idx is not None and out.recv_topk_weights is not None
    twice = replace(out, recv_topk_idx=torch.full_like(out.recv_topk_idx, 1))
    once = replace(
        twice,
        recv_topk_idx=twice.recv_topk_idx[..., :1].contiguous(),
        recv_topk_weights=out.recv_topk_weights.sum(-1, keepdim=True),
    )
    a, b = (existing(o, kernel().compute(o, layout, weights)) for o in (twice, once))
    assert_close(a, b.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weighted_rows_are_summed_in_float32(dtype: torch.dtype) -> None:
    """1 + 2**-12 + ... cannot be summed in two bytes, nor can such a weight be held in them."""
    inter = 8
    w13 = torch.ones(4, 2 * inter, 8, dtype=dtype) / 8  # relu(1) * 1
    w2 = torch.ones(4, 8, inter, dtype=dtype) / 8
    weights = UnquantizedMoEWeights(w13, w2)
    factors = torch.tensor([[[1.0, 2.0**-12, 2.0**-12, -1.0]]])
    out = DispatchOutput(torch.ones(1, 1, 8, dtype=dtype), torch.arange(4)[None, None], factors, torch.ones(1).int())
    assert kernel("relu").compute(out, EpLayout.RANK_MAJOR, weights).float().eq(2.0**-11).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_give_the_same_bits(layout: EpLayout) -> None:
    weights, out = make_weights(torch.bfloat16), received(layout, torch.bfloat16, counts=(40, 3, 25))
    a, b = (existing(out, kernel().compute(out, layout, weights)) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_rows_weights_and_into(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    want = existing(out, kernel().compute(out, layout, weights))

    def spread(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, 99)], -1).flatten(-2)[..., ::2]

    apart = UnquantizedMoEWeights(weights.w13.mT.contiguous().mT, spread(weights.w2))
    strided = replace(out, expert_tensors=spread(out.expert_tensors))
    if out.recv_topk_idx is not None and out.recv_topk_weights is not None:
        strided = replace(
            strided, recv_topk_idx=spread(out.recv_topk_idx), recv_topk_weights=spread(out.recv_topk_weights)
        )
    into = spread(torch.full_like(out.expert_tensors, 7.0))
    kernel().compute(strided, layout, apart, into=into)
    assert_close(existing(out, into), want.double())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainable_weights_record_nothing(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    want = existing(out, kernel().compute(out, layout, weights))
    weights.w13.requires_grad_(), weights.w2.requires_grad_()
    result = kernel().compute(out, layout, weights)
    assert not result.requires_grad
    assert torch.equal(existing(out, result), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 1, 0), (5, 0, 3), (1, 40, 7), (0, 0, 0)])
def test_both_products_agree(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    weights, x = make_weights(dtype), torch.randn(sum(sizes), H).to(dtype)
    want = torch.cat(
        [
            reference.expert_mlp(part, weights.w13[expert], weights.w2[expert])
            for expert, part in enumerate(x.split(list(sizes)))
        ]
    )
    grouped = grouped_experts(x, weights, ACTIVATIONS["silu"], torch.tensor(sizes).cumsum(0, dtype=torch.int32))
    each = torch.full_like(x, NAN)
    each_expert(x.split(list(sizes)), weights, ACTIVATIONS["silu"], each.split(list(sizes)))
    assert_close(grouped, want)
    assert_close(each, want)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_with_and_without_the_instructions(monkeypatch, layout: EpLayout, native: bool) -> None:
    monkeypatch.setattr(grouped_gemm, "_half_is_native", lambda: native)
    weights, out = make_weights(torch.float16), received(layout, torch.float16)
    assert takes_grouped_mm(weights) is native
    assert_close(existing(out, kernel().compute(out, layout, weights)), expected(out, weights))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [(2, 0, 7), (0, 0, 0), (8, 8, 8)])
def test_the_form_without_host_reads(layout: EpLayout, counts: tuple[int, ...]) -> None:
    """What CUDA runs, run here; also into memory that is not contiguous."""
    weights, out = make_weights(torch.float32), received(layout, counts=counts)
    for result in torch.full_like(out.expert_tensors, NAN), torch.full((*out.expert_tensors.shape, 2), NAN)[..., 0]:
        kernel()._on_device(out, weights, result)
        assert_close(existing(out, result), expected(out, weights))


@pytest.mark.parametrize("full", [(True, True, False), (True, False, True), (False, True, True)])
@pytest.mark.parametrize("missing", [0, 1])
def test_rows_of_fewer_experts_than_are_here(full: tuple[bool, ...], missing: int) -> None:
    """A token has a row for at most K experts, here 2 of 3: two blocks of all rows are what can arrive."""
    counts = [8 if each else 0 for each in full]  # 8 is the capacity
    counts[full.index(True)] -= missing
    weights, out = make_weights(torch.float32), received(EpLayout.EXPERT_MAJOR, counts=tuple(counts))
    result, two = torch.full_like(out.expert_tensors, NAN), kernel()
    two.validate(replace(PARAMS, max_topk=2), weights)
    two._on_device(out, weights, result)
    assert_close(existing(out, result), expected(out, weights))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, 16), (torch.bfloat16, 10), (torch.float32, 16)])
def test_cuda(layout: EpLayout, dtype: torch.dtype, hidden: int) -> None:
    weights, out = make_weights(dtype, hidden=hidden), received(layout, dtype, hidden=hidden)
    there = DispatchOutput(**{name: None if t is None else t.cuda() for name, t in vars(out).items()})
    weights_there = UnquantizedMoEWeights(weights.w13.cuda(), weights.w2.cuda())
    into = torch.full_like(there.expert_tensors, 7.0)
    kernel().compute(there, layout, weights_there, into=into)
    torch.cuda.synchronize()
    assert_close(existing(out, into.cpu()), expected(out, weights))
    if takes_grouped_mm(weights_there):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # refuses whatever waits for the stream
            kernel().compute(there, layout, weights_there, into=into)
        there.expert_tensors.mul_(2)
        graph.replay()
        doubled = replace(out, expert_tensors=out.expert_tensors * 2)
        assert_close(existing(out, into.cpu()), expected(doubled, weights))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("special", ["random", "distinct", "one_expert", "duplicates", "absent", "signed"])
def test_a_whole_step(layout: EpLayout, special: str) -> None:
    """Dispatch and combine of the reference around this kernel, with ranks that have nothing."""
    problem = make_problem(3, 4, 7, H, 3, [5, 0, 1, 8], special=special)
    params, (w13, w2) = problem.params(layout), problem.weights(I)
    outs = reference.dispatch(problem.xs, *problem.routing, params, fill=NAN)
    first, rows = 0, []
    for rank, out in enumerate(outs):
        held = 2 if rank < 3 else 1  # 7 experts on 4 ranks
        weights = UnquantizedMoEWeights(w13[first : first + held], w2[first : first + held])
        rows.append(kernel().compute(out, layout, weights, into=torch.full_like(out.expert_tensors, NAN)))
        first += held
    got = reference.combine(rows, *problem.routing, params)
    for y, want in zip(got, reference.forward(problem.xs, *problem.routing, w13, w2)):
        assert y is not None and want is not None
        assert_close(y, want)


PARAMS = FleetParams(4, 8, H, dtype_bytes=4, algorithm=EpAlgorithm.LOW_LATENCY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_fit(dtype: torch.dtype) -> None:
    weights, width = make_weights(dtype), dtype.itemsize
    kernel().validate(replace(PARAMS, dtype_bytes=width), weights)
    assert kernel().preprocess(weights) is weights
    assert kernel().requires_weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "weights: got none, allowed some with kernel 'grouped_gemm'"),
        (
            MoEWeightPack(torch.zeros(3, 8, H), torch.zeros(3, H, 4), torch.ones(3), torch.ones(3)),
            "w13_scale: got torch.float32 .* a scale for each 128 x 128 block",
        ),
        (make_weights(torch.float64), "dtype torch.float64, allowed torch.float32 or"),
        (make_weights(torch.bfloat16), "torch.bfloat16, allowed a type of 4 bytes, like combine's rows"),
        (make_weights(torch.float32, hidden=12), "H = 12, allowed FleetParams.token_hidden_size = 16"),
        (make_weights(torch.float32, experts=5), "5 local experts, allowed at most FleetParams.num_experts = 4"),
    ],
)
def test_weights_that_do_not_fit(weights: UnquantizedMoEWeights | None, message: str) -> None:
    with pytest.raises(MoEEpConfigError, match=message):
        kernel().validate(PARAMS, weights)


def test_unknown_activation() -> None:
    with pytest.raises(MoEEpConfigError, match=r"GroupedGemmConfig.activation: got 'swish', allowed silu, gelu"):
        kernel("swish")


def test_rows_that_do_not_fit_the_weights() -> None:
    out = received(EpLayout.EXPERT_MAJOR, torch.bfloat16)
    with pytest.raises(MoEEpConfigError, match=r"dtype torch.bfloat16, allowed the weights' torch.float32"):
        kernel().compute(out, EpLayout.EXPERT_MAJOR, make_weights(torch.float32))
    with pytest.raises(MoEEpConfigError, match="3 blocks, allowed the weights' L = 2"):
        kernel().compute(out, EpLayout.EXPERT_MAJOR, make_weights(torch.bfloat16, experts=2))


# Biases and the options of the gate: gpt-oss's experts.

OPTIONS = GroupedGemmConfig("silu", limit=1.5, alpha=1.702, up_shift=1.0)


def with_biases(weights: UnquantizedMoEWeights) -> UnquantizedMoEWeights:
    generator = torch.Generator().manual_seed(5)
    biases = [torch.randn(plane.shape[:2], generator=generator).to(plane.dtype) for plane in (weights.w13, weights.w2)]
    return UnquantizedMoEWeights(weights.w13, weights.w2, *biases)


def clamped_expert(x: torch.Tensor, weights: UnquantizedMoEWeights, expert: int) -> torch.Tensor:
    """One expert in float64, written like the original."""
    w13, w2, b13, b2 = (plane[expert].double() for plane in weights.planes)
    gate, up = (w13 @ x.double() + b13).chunk(2)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return w2 @ ((up + 1) * gate * torch.sigmoid(gate * 1.702)) + b2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 10])
def test_biases_and_a_clamped_gate(layout: EpLayout, dtype: torch.dtype, hidden: int) -> None:
    weights, out = with_biases(make_weights(dtype, hidden=hidden)), received(layout, dtype, hidden=hidden)
    x, got = existing(out, out.expert_tensors), get_kernel(OPTIONS).compute(out, layout, weights)
    if out.recv_topk_idx is None:
        experts = [expert for expert, count in enumerate(out.expert_counts.tolist()) for _ in range(count)]
        want = torch.stack([clamped_expert(row, weights, expert) for row, expert in zip(x, experts)])
    else:
        want = torch.zeros_like(x, dtype=torch.float64)
        ids, factors = existing(out, out.recv_topk_idx), existing(out, out.recv_topk_weights)
        for row in range(len(x)):
            for expert, factor in zip(ids[row].tolist(), factors[row].tolist()):
                if 0 <= expert < weights.num_local_experts:
                    want[row] += factor * clamped_expert(x[row], weights, expert)
    assert_close(existing(out, got), want)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (GroupedGemmConfig("gelu", alpha=2.0), r"alpha: got 2.0, allowed 1 with 'gelu'"),
        (GroupedGemmConfig(limit=0.0), r"limit: got 0.0, allowed more than 0"),
    ],
)
def test_options_that_do_not_go_together(config: GroupedGemmConfig, match: str) -> None:
    with pytest.raises(MoEEpConfigError, match=match):
        get_kernel(config)


def test_biases_that_do_not_fit() -> None:
    weights = with_biases(make_weights(torch.float32))
    w13, w2, b13, b2 = weights.planes
    for biases, match in (
        ((b13, None), "w2_bias: got None, allowed a bias for both"),
        ((b13[:, 1:], b2), "w13_bias: got shape"),
        ((b13, b2.double()), "w2_bias: got torch.float64"),
    ):
        with pytest.raises(MoEEpConfigError, match=match):
            UnquantizedMoEWeights(w13, w2, *biases)
