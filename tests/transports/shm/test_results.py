"""Memory of sums is used again once nobody holds it, and not before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moefleet.transports.shm.results import LEAST_BYTES, MOST_SPARE, MOST_TOO_LARGE, Results

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


def test_no_more_is_kept_than_steps_need() -> None:
    results = Results(HIDDEN)
    held = [results.maker(ROWS, torch.float32)() for _ in range(MOST_SPARE + 2)]
    assert len(results._lent) == len(held)
    held.clear()
    assert (len(results._lent), len(results._spare)) == (0, MOST_SPARE)
    results.maker(ROWS, torch.float32)()
    assert len(results._spare) == MOST_SPARE


def test_a_small_result_that_is_kept_does_not_keep_the_memory_of_a_large_one() -> None:
    results = Results(HIDDEN)
    kept, most = [], 0
    for _ in range(5):
        results.maker(40 * ROWS, torch.float32)()
        kept.append(results.maker(ROWS, torch.float32)())
        most = max(most, sum(memory.nbytes for _, memory in results._lent.values()))
    assert most <= MOST_TOO_LARGE * sum(tensor.nbytes for tensor in kept)
    at = results.maker(30 * ROWS, torch.float32)().data_ptr()
    assert results.maker(40 * ROWS, torch.float32)().data_ptr() == at, "a little less fits"


@pytest.mark.parametrize("count", [1, ROWS])
def test_results_are_on_the_cpu_whatever_the_default_device(count: int) -> None:
    with torch.device("meta"):
        assert Results(HIDDEN).maker(count, torch.float32)().device == torch.device("cpu")


def test_nothing_is_kept_once_closed() -> None:
    results = Results(HIDDEN)
    make = results.maker(ROWS, torch.float32)
    kept, other = make().fill_(3), make()
    del other
    results.close()
    assert not results._spare and (kept == 3).all()
    del kept
    assert not results._spare and not results._lent


def test_results_outlast_what_made_them() -> None:
    results = Results(HIDDEN)
    kept = results.maker(ROWS, torch.float32)().fill_(3)
    gone = weakref.ref(results)
    del results
    gc.collect()
    assert gone() is None and (kept == 3).all()
