"""The movements for GPUs, on CPU tensors: they do what those of the host do, with indices that came in one transfer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefleet.substrate import device_gather
from moefleet.substrate.device_gather import DEVICE, tensors_at, upload
from moefleet.substrate.gather import HOST


def test_arrays_of_any_type_come_in_one_transfer() -> None:
    arrays = [
        np.arange(5),
        np.zeros(0, np.int64),
        np.array([[1.5, -2.0]], np.float32),
        np.array([7], np.uint8),
        np.arange(20, dtype=np.int32)[::2],
    ]
    there = upload(arrays, "cpu")
    for each, tensor in zip(arrays, there, strict=True):
        assert torch.equal(tensor, torch.from_numpy(each.copy()))
    assert len({tensor.untyped_storage().data_ptr() for tensor in there}) == 1
    for each in arrays:
        each += 1  # type: ignore[misc]
    assert there[0].tolist() == [0, 1, 2, 3, 4]


def test_what_is_there_already_stays() -> None:
    index = torch.arange(3)
    first, second, third = tensors_at(torch.zeros(1), np.array([4]), index, np.array([5.0]))
    assert (first.tolist(), third.tolist()) == ([4], [5.0]) and second is index


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_as_on_the_host(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk_bytes: int) -> None:
    monkeypatch.setattr(device_gather, "_CHUNK_BYTES", chunk_bytes)
    table = torch.randn(8, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows, bag = np.array([0, 5, 5, 2, 7, 1, 3]), np.array([0, 2, 2, 6, 7, 7])
    weight = np.linspace(-2, 1.5, 7, dtype=np.float32)
    assert torch.equal(DEVICE.sum_bags(table, rows, bag), HOST.sum_bags(table, rows, bag))
    assert not DEVICE.sum_bags(table, rows[:0], np.zeros(3, np.int64)).any()
    mine, theirs = torch.empty(5, 20, dtype=dtype), torch.empty(5, 20, dtype=dtype)
    DEVICE.weighted_sum_bags(table, rows, weight, bag, mine)
    HOST.weighted_sum_bags(table, rows, weight, bag, theirs)
    assert torch.equal(mine, theirs)
    wanted = torch.zeros(9, 20, dtype=dtype)
    HOST.gather_blocks(table, rows, wanted, [3, 4], [0, 5])
    for index in (rows, torch.from_numpy(rows)):
        moved = torch.zeros(9, 20, dtype=dtype)
        DEVICE.gather_blocks(table, index, moved, [3, 4], [0, 5])
        assert torch.equal(moved, wanted)
