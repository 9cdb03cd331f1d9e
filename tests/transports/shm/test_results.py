"""Memory of sums is used again once nobody holds it, and not before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moefleet.transports.shm.results import LEAST_BYTES, MOST_SPARE, Results

ROWS, HIDDEN = 64, LEAST_BYTES // 64 // 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, ROWS])
def test_tensors_are_the_callers_own(dtype: torch.dtype, count: int) -> None:
    make = Results(HIDDEN).maker(count, dtype)
    tensors = [make().fill_(number) for number in range(6)]
    for number, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((count, HIDDEN), dtype, False)
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 and type(tensor) is torch.Tensor
        assert (tensor == number).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_comes_back_with_the_last_view_of_it(dtype: torch.dtype) -> None:
    make = Results(HIDDEN).maker(ROWS, dtype)
    first = make()
    at, row = first.data_ptr(), first[3:4]
    del first
    other = make()
    assert other.data_ptr() != at, "a row is still held"
    row.fill_(7)
    del row
    assert make().data_ptr() == at


def test_a_result_that_autograd_keeps_is_not_written_over() -> None:
    make, weight = Results(HIDDEN).maker(ROWS, torch.float32), torch.ones(HIDDEN, requires_grad=True)
    result = make().fill_(2)
    loss = (result * weight).sum()
    del result
    make().fill_(5)
    loss.backward()
    assert weight.grad is not None and (weight.grad == 2 * ROWS).all()


def test_what_is_too_small_or_too_much_is_not_kept() -> None:
    results = Results(HIDDEN)
    make, more = results.maker(ROWS, torch.float32), results.maker(4 * ROWS, torch.float32)
    held = [make() for _ in range(MOST_SPARE + 2)]
    assert len(results._lent) == len(held)
    held.clear()
    assert (len(results._lent), len(results._spare)) == (0, MOST_SPARE)
    large = more()
    assert not results._spare
    at = large.data_ptr()
    del large
    assert make().data_ptr() == at, "smaller sums fit, too"


def test_results_outlast_what_made_them() -> None:
    results = Results(HIDDEN)
    kept = results.maker(ROWS, torch.float32)().fill_(3)
    gone = weakref.ref(results)
    del results
    gc.collect()
    assert gone() is None and (kept == 3).all()
