"""Few rows through the compiled helper, against float64, and when the kernel takes that way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefleet import reference
from moefleet.config import EpLayout, GroupedGemmConfig
from moefleet.kernels import get_kernel, grouped_gemm
from moefleet.kernels.few_rows import FewRows
from moefleet.tensors import DispatchOutput
from moefleet.weights import UnquantizedMoEWeights
from tests.kernels.test_grouped_gemm import (
    LAYOUTS,
    OPTIONS,
    clamped_expert,
    existing,
    make_weights,
    received,
    with_biases,
)
from tests.native.needs import needs_the_helper

pytestmark = needs_the_helper
NAN = float("nan")
PLENTY = 1000


def few_rows(config: GroupedGemmConfig | None = None) -> FewRows:
    found = FewRows.of(config or GroupedGemmConfig())
    assert found is not None
    return found


def expected(out: DispatchOutput, weights: UnquantizedMoEWeights, clamped: bool = False) -> torch.Tensor:
    """float64 ``[rows, H]`` of the rows that exist."""

    def made(x: torch.Tensor, expert: int) -> torch.Tensor:
        if clamped:
            return clamped_expert(x, weights, expert)
        return reference.expert_mlp(x[None], weights.w13[expert], weights.w2[expert])[0]

    x = existing(out, out.expert_tensors).double()
    y = torch.zeros_like(x)
    if out.recv_topk_idx is None:
        assert out.expert_counts is not None
        expert_of = [[expert] for expert, count in enumerate(out.expert_counts.tolist()) for _ in range(count)]
        factors = torch.ones(len(x), 1)
    else:
        assert out.recv_topk_weights is not None
        expert_of = existing(out, out.recv_topk_idx).tolist()
        factors = existing(out, out.recv_topk_weights)
    for row, experts in enumerate(expert_of):
        for slot, expert in enumerate(experts):
            if 0 <= expert < weights.num_local_experts:
                y[row] += factors[row, slot].double() * made(x[row], expert)
    return y


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got.double() - want).abs().max().item() <= 2.0**-20 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("hidden", "inter"), [(16, 24), (10, 7), (3, 1), (144, 33), (128, 96)])
@pytest.mark.parametrize("counts", [(2, 0, 7), (1, 1, 1), (8, 5, 6)])
def test_against_float64(layout: EpLayout, hidden: int, inter: int, counts: tuple[int, ...]) -> None:
    """Sizes that fill vectors and blocks of rows and outputs, and sizes that leave a rest; repeated and absent ids."""
    weights, out = (
        make_weights(torch.float32, hidden=hidden, inter=inter),
        received(layout, hidden=hidden, counts=counts),
    )
    into = torch.full_like(out.expert_tensors, 7.0)
    assert few_rows().compute(out, weights, into, PLENTY)
    assert_close(existing(out, into), expected(out, weights))
    assert (into == 7).sum() == into.numel() - existing(out, into).numel(), "rows past the counts are left alone"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_and_a_clamped_gate(layout: EpLayout) -> None:
    weights, out = with_biases(make_weights(torch.float32)), received(layout)
    into = torch.full_like(out.expert_tensors, NAN)
    assert few_rows(OPTIONS).compute(out, weights, into, PLENTY)
    assert_close(existing(out, into), expected(out, weights, clamped=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_may_be_the_rows_themselves(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    want = expected(out, weights)
    assert few_rows().compute(out, weights, out.expert_tensors, PLENTY)
    assert_close(existing(out, out.expert_tensors), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [(2, 0, 7), (0, 0, 0)])
def test_up_to_so_many_pairs(layout: EpLayout, counts: tuple[int, ...]) -> None:
    weights, out = make_weights(torch.float32), received(layout, counts=counts)
    ids = out.recv_topk_idx
    here = sum(counts) if ids is None else int(((existing(out, ids) >= 0) & (existing(out, ids) < 3)).sum())
    into = torch.full_like(out.expert_tensors, 7.0)
    if here:
        assert not few_rows().compute(out, weights, into, here - 1)
        assert (into == 7).all(), "nothing has changed"
    assert few_rows().compute(out, weights, into, here)
    assert_close(existing(out, into), expected(out, weights)) if here else None


def test_numbers_of_any_size_and_those_that_are_none() -> None:
    """As torch's silu: no overflow on either side, and what is no number stays none."""
    gates = torch.tensor([0.0, -1e-30, 20.0, -20.0, 87.5, -87.5, 1e4, -1e4, 3e38, -3e38, NAN])
    weights = UnquantizedMoEWeights(
        torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0], [0.0]]])
    )  # row (g, u) becomes (silu(g) * u, 0)
    rows = torch.stack([gates, torch.ones_like(gates)], 1)[None]
    out, got = DispatchOutput(rows, expert_counts=torch.tensor([len(gates)]).int()), torch.empty_like(rows)
    assert few_rows().compute(out, weights, got, PLENTY)
    torch.testing.assert_close(got[0, :, 0], torch.nn.functional.silu(gates), rtol=3e-7, atol=2e-36, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_for_c_to_read_is_left_alone(layout: EpLayout) -> None:
    weights, out = make_weights(torch.float32), received(layout)
    into = torch.full_like(out.expert_tensors, 7.0)

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor], -1)[..., 0]

    strided = (
        UnquantizedMoEWeights(apart(weights.w13), weights.w2),
        UnquantizedMoEWeights(weights.w13, apart(weights.w2)),
    )
    assert not any(few_rows().compute(out, each, into, PLENTY) for each in strided)
    half = UnquantizedMoEWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
    assert not few_rows().compute(out, half, into, PLENTY)
    assert not few_rows().compute(replace(out, expert_tensors=apart(out.expert_tensors)), weights, into, PLENTY)
    assert not few_rows().compute(out, weights, apart(into), PLENTY)
    name = "recv_total_counter" if out.expert_counts is None else "expert_counts"
    wide = replace(out, **{name: getattr(out, name).long()})
    assert not few_rows().compute(wide, weights, into, PLENTY)
    if out.recv_topk_idx is not None and out.recv_topk_weights is not None:
        assert not few_rows().compute(replace(out, recv_topk_idx=apart(out.recv_topk_idx)), weights, into, PLENTY)
        assert not few_rows().compute(
            replace(out, recv_topk_weights=apart(out.recv_topk_weights)), weights, into, PLENTY
        )
    assert (into == 7).all()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_other_activations_are_torchs(activation: str) -> None:
    assert FewRows.of(GroupedGemmConfig(activation)) is None


@pytest.mark.parametrize(
    ("threads", "small_bytes", "few", "calls"), [(1, 0, 8, 1), (4, 1 << 21, 8, 1), (4, 0, 8, 0), (1, 0, 0, 1)]
)
def test_when_the_kernel_takes_this_way(monkeypatch, threads: int, small_bytes: int, few: int, calls: int) -> None:
    """With one thread, or small weights; where rows turn out to be many the others compute them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(grouped_gemm, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(grouped_gemm, "FEW_ROWS", few)
    asked = []
    compute = FewRows.compute
    monkeypatch.setattr(FewRows, "compute", lambda *args: asked.append(compute(*args)) or asked[-1])
    weights, out = make_weights(torch.float32), received(EpLayout.FLAT, counts=(4,))
    got = get_kernel("grouped_gemm").compute(out, EpLayout.FLAT, weights)
    assert asked == [few > 0] * calls
    assert_close(existing(out, got), expected(out, weights))
