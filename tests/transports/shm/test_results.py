"""Memory of sums is used again once nobody holds it, and not before."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moefleet.transports.shm import results as module
from moefleet.transports.shm.results import MOST_KEPT, Results, can_tell

ROWS, HIDDEN = 3, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_this_torch_says_who_holds_a_storage() -> None:
    assert can_tell()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, ROWS])
def test_tensors_are_the_callers_own(dtype: torch.dtype, count: int) -> None:
    make = Results(HIDDEN).maker(count, dtype)
    tensors = [make().fill_(number) for number in range(6)]
    for number, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((count, HIDDEN), dtype, False)
        assert tensor.is_contiguous() and type(tensor) is torch.Tensor and not tensor._is_view()
        assert (tensor == number).all()


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda y: y,
    "a row": lambda y: y[1:2],
    "another shape": lambda y: y.view(-1),
    "another type": lambda y: y.view(torch.int32),
    "detached": lambda y: y.detach(),
    "its storage": lambda y: y.untyped_storage(),
    "its typed storage": lambda y: y._typed_storage(),
    "NumPy": lambda y: y.numpy(),
    "NumPy's row": lambda y: y.numpy()[1:],
    "DLPack": lambda y: torch.utils.dlpack.to_dlpack(y),
    "autograd": lambda y: (y * torch.ones(HIDDEN, requires_grad=True)).sum(),
    "a gradient": lambda y: y.requires_grad_().sum(),
    "a shallow copy": copy.copy,
    "a tensor that was set to it": lambda y: torch.empty(0).set_(y),
    "a parameter": lambda y: torch.nn.Parameter(y),
    "another thread": lambda y: holding(y),
}


def holding(y: torch.Tensor) -> Iterator[None]:
    """A thread that holds it until the iterator goes."""
    held, go, done = [y], threading.Event(), threading.Event()

    def hold() -> None:
        mine = held.pop()
        done.set()
        go.wait(30)
        del mine

    thread = threading.Thread(target=hold)
    thread.start()
    del y
    done.wait(30)

    def until_it_goes() -> Iterator[None]:
        try:
            yield
        finally:
            go.set()
            thread.join()

    iterator = until_it_goes()
    next(iterator)
    return iterator


@pytest.mark.parametrize("how", HOLDERS)
def test_memory_is_used_again_once_nothing_holds_it_and_not_before(how: str) -> None:
    make = Results(HIDDEN).maker(ROWS, torch.float32)

    def places(count: int) -> list[int]:
        return [tensor.data_ptr() for tensor in [make() for _ in range(count)]]

    first = make()
    at, held = first.data_ptr(), HOLDERS[how](first)
    del first
    for _ in range(3):
        assert at not in places(MOST_KEPT - 1)
    del held
    gc.collect()
    assert at in places(MOST_KEPT)


def test_what_callers_do_to_a_tensor_stays_theirs() -> None:
    make, weight = Results(HIDDEN).maker(ROWS, torch.float32), torch.ones(HIDDEN, requires_grad=True)
    for change in (
        lambda y: y.t_(),
        lambda y: y.unsqueeze_(0),
        lambda y: y.resize_(2, 2),
        lambda y: y.resize_(50, HIDDEN),
        lambda y: y.requires_grad_(),
        lambda y: y.mul_(weight),
        lambda y: y.set_(torch.empty(3)),
        lambda y: y.share_memory_(),
        lambda y: y.untyped_storage().resize_(0),
    ):
        change(make().fill_(1.0))
        y = make()
        assert (y.shape, y.stride(), y.requires_grad) == ((ROWS, HIDDEN), (HIDDEN, 1), False)
        assert not y.is_shared() and y.untyped_storage().nbytes() >= y.nbytes
        y.fill_(2.0)


def test_results_of_inference_mode_serve_outside() -> None:
    make = Results(HIDDEN).maker(ROWS, torch.float32)
    with torch.inference_mode():
        at = make().fill_(1.0).data_ptr()
    y = make().fill_(2.0)
    assert y.data_ptr() == at and not y.is_inference()
    (y * torch.ones(HIDDEN, requires_grad=True)).sum().backward()


def test_no_more_is_kept_than_steps_need() -> None:
    results = Results(HIDDEN)
    held = [results.maker(count, torch.float32)() for count in range(1, 10)]
    assert len(results._kept) == MOST_KEPT
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in held]
    held.clear()
    assert [ref() is None for ref in gone] == [True] * (9 - MOST_KEPT) + [False] * MOST_KEPT
    at = results.maker(9, torch.float32)().data_ptr()
    assert results.maker(9, torch.float32)().data_ptr() == at, "the last used stay"
    assert results.maker(9, torch.float16)().dtype == torch.float16


@pytest.mark.parametrize("count", [1, ROWS])
def test_results_are_on_the_cpu_whatever_the_default_device(count: int) -> None:
    with torch.device("meta"):
        assert Results(HIDDEN).maker(count, torch.float32)().device == torch.device("cpu")


def test_nothing_is_kept_once_closed() -> None:
    results = Results(HIDDEN)
    make = results.maker(ROWS, torch.float32)
    kept, other = make().fill_(3), make()
    results.close()
    del other
    assert not results._kept and (kept == 3).all()
    assert make().shape == (ROWS, HIDDEN) and not results._kept


def test_threads_get_memory_of_their_own() -> None:
    make, wrong = Results(HIDDEN).maker(ROWS, torch.float32), []

    def work(number: int) -> None:
        for step in range(2000):
            y = make().fill_(number * 10000 + step)
            if not (y == number * 10000 + step).all():
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("broken", [None, lambda number: 7, lambda: 7], ids=["none", "wrong", "other arguments"])
def test_where_torch_does_not_say_nothing_is_kept(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_use_count", broken)
    can_tell.cache_clear()
    try:
        results = Results(HIDDEN)
        make = results.maker(ROWS, torch.bfloat16)
        first, second = make().fill_(1), make().fill_(2)
        assert (first == 1).all() and (second == 2).all() and not results._kept
    finally:
        can_tell.cache_clear()
