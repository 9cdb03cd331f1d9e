"""The identity kernel in the three layouts, built by hand."""

from __future__ import annotations

import pytest
import torch

from moefleet.config import EpLayout, IdentityConfig
from moefleet.kernels import get_kernel
from moefleet.tensors import DispatchOutput

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_rank(dtype: torch.dtype = torch.float32) -> DispatchOutput:
    """Two sources with room for 3 rows each, of which 2 and 0 exist; NaN past the counts."""
    rows, weights = torch.full((2, 3, 4), NAN), torch.full((2, 3, 2), NAN)
    rows[0, :2] = torch.arange(8.0).reshape(2, 4) / 3
    weights[0, :2] = torch.tensor([[0.3, 0.45], [0.125, NAN]])
    ids = torch.tensor([[[1, 1], [0, -1], [5, 5]], [[2, 2]] * 3])
    return DispatchOutput(rows.to(dtype), ids, weights, expert_counts=int32(2, 0))


def flat(out: DispatchOutput) -> DispatchOutput:
    """The first source's block as a FLAT output."""
    assert out.recv_topk_idx is not None and out.recv_topk_weights is not None and out.expert_counts is not None
    return DispatchOutput(
        out.expert_tensors[0],
        out.recv_topk_idx[0],
        out.recv_topk_weights[0],
        recv_total_counter=out.expert_counts[:1],
    )


@pytest.fixture
def kernel():
    return get_kernel(IdentityConfig())


def test_needs_no_weights(kernel) -> None:
    assert not kernel.requires_weights
    assert kernel.preprocess(None) is None


def test_expert_major_hands_the_rows_on(kernel) -> None:
    out = DispatchOutput(torch.randn(2, 3, 4), expert_counts=int32(1, 3))
    assert kernel.compute(out, EpLayout.EXPERT_MAJOR, None) is out.expert_tensors


def test_expert_major_into_copies_what_exists(kernel) -> None:
    out = DispatchOutput(torch.full((3, 3, 4), NAN), expert_counts=int32(1, 0, 3))
    out.expert_tensors[0, 0], out.expert_tensors[2] = 1.5, 2.5
    into = torch.full((3, 3, 4), 7.0)
    assert kernel.compute(out, EpLayout.EXPERT_MAJOR, None, into=into) is into
    assert into[:, :, 0].tolist() == [[1.5, 7, 7], [7, 7, 7], [2.5, 2.5, 2.5]]


@pytest.mark.parametrize("layout", [EpLayout.RANK_MAJOR, EpLayout.FLAT])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [True, False])
def test_rows_times_the_sum_of_their_weights(kernel, layout: EpLayout, dtype: torch.dtype, given: bool) -> None:
    ranks = by_rank(dtype)
    out = flat(ranks) if layout is EpLayout.FLAT else ranks
    into = torch.full_like(out.expert_tensors, 7.0) if given else None
    result = kernel.compute(out, layout, None, into=into)
    assert result.shape == out.expert_tensors.shape and result.dtype == dtype
    share = torch.tensor([0.3 + 0.45, 0.125], dtype=torch.float32)  # two slots of one expert add up, -1 adds nothing
    expected = (ranks.expert_tensors[0, :2].float() * share[:, None]).to(dtype)
    fronts = result if layout is EpLayout.FLAT else result[0]
    assert torch.equal(fronts[:2], expected)
    if given:
        assert result is into
        assert (into == 7).sum() == into.numel() - 8, "only rows that exist are written"


def test_a_row_without_local_ids_is_zero(kernel) -> None:
    out = DispatchOutput(torch.ones(1, 1, 4), torch.full((1, 1, 2), -1), torch.ones(1, 1, 2), int32(1))
    assert kernel.compute(out, EpLayout.RANK_MAJOR, None).eq(0).all()


def test_into_may_be_the_rows_themselves(kernel) -> None:
    out = by_rank()
    expected = kernel.compute(out, EpLayout.RANK_MAJOR, None)[0, :2]
    assert torch.equal(kernel.compute(out, EpLayout.RANK_MAJOR, None, into=out.expert_tensors)[0, :2], expected)


def test_float8_rows(kernel) -> None:
    dtype = torch.float8_e4m3fn
    out = DispatchOutput(
        torch.full((1, 2, 4), 3.0).to(dtype), torch.zeros(1, 2, 1).long(), torch.ones(1, 2, 1) / 2, int32(2)
    )
    assert kernel.compute(out, EpLayout.RANK_MAJOR, None).float().eq(1.5).all()


def test_nothing_received(kernel) -> None:
    none = DispatchOutput(torch.empty(0, 4, 8), expert_counts=int32())
    assert kernel.compute(none, EpLayout.EXPERT_MAJOR, None, into=torch.empty(0, 4, 8)).shape == (0, 4, 8)
    empty = DispatchOutput(
        torch.full((4, 8), NAN), torch.zeros(4, 2).long(), torch.ones(4, 2), recv_total_counter=int32(0)
    )
    assert kernel.compute(empty, EpLayout.FLAT, None, into=torch.zeros(4, 8)).eq(0).all()
