"""Steps whose rows travel as fp8: the reference against itself along its two paths, and against rows as they were."""

from __future__ import annotations

import pytest
import torch

from moefleet import EpLayout, MoEEpConfigError, quant, reference
from tests.strategies import SPECIALS, make_problem

LAYOUTS = pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("special", SPECIALS)
def test_split_path_is_forward(layout: EpLayout, dtype: torch.dtype, special: str) -> None:
    p = make_problem(2, 3, 5, 130, 3, [4, 0, 3], dtype, special)
    params = p.params(layout)
    outs = reference.dispatch(p.xs, *p.routing, params, quantised=True, fill=float("nan"))
    for out in outs:
        assert out.expert_tensors.dtype == quant.ROW_DTYPE and out.row_dtype == dtype
        assert out.expert_scales is not None and out.expert_scales.shape == (*out.expert_tensors.shape[:-1], 2)
    rows = [reference.compute(out, lambda x, index: x, fill=float("nan")) for out in outs]
    got = reference.combine(rows, *p.routing, params)
    want = reference.identity_forward(p.xs, *p.routing, 5, quantised=True)
    plain = reference.identity_forward(p.xs, *p.routing, 5)
    for x, weights, y, same, near in zip(p.xs, p.topk_weights, got, want, plain):
        assert y is not None and same is not None and near is not None
        if not x.numel():
            continue
        largest = float(x.double().abs().max() * max(1.0, float(weights.abs().sum(1).max())))
        assert (y.double() - same).abs().max() <= reference.tolerance(dtype, 3, 3, largest)
        assert (y.double() - near).abs().max() <= reference.quantised_tolerance(dtype, 3, 3, largest)


def test_gated_experts_see_decoded_rows() -> None:
    p = make_problem(3, 2, 4, 130, 2, [3, 2], special="distinct")
    w13, w2 = p.weights()
    seen = [quant.decode(*quant.encode(x)) for x in p.xs]
    for y, want in zip(
        reference.forward(p.xs, *p.routing, w13, w2, quantised=True), reference.forward(seen, *p.routing, w13, w2)
    ):
        assert y is not None and want is not None and torch.allclose(y, want, rtol=1e-6, atol=1e-6)


@LAYOUTS
def test_rows_that_come_as_fp8(layout: EpLayout) -> None:
    """Scaled by the caller: what arrives is what the knob would have made, and combine's rows are bfloat16."""
    p = make_problem(4, 2, 4, 130, 2, [3, 2], torch.bfloat16)
    xs, scales = zip(*map(quant.encode, p.xs))
    params = p.params(layout, dtype_bytes=1, scale_bytes_per_token=8)
    came = reference.dispatch(xs, *p.routing, params, scales=scales)
    made = reference.dispatch(p.xs, *p.routing, p.params(layout), quantised=True)
    for a, b in zip(came, made):
        assert torch.equal(a.expert_tensors.view(torch.uint8), b.expert_tensors.view(torch.uint8))
        assert torch.equal(a.expert_scales, b.expert_scales) and a.row_dtype == torch.bfloat16
    with pytest.raises(MoEEpConfigError, match="8 bytes, as FleetParams says"):
        reference.dispatch(xs, *p.routing, params, scales=[s[:, :1] for s in scales])
