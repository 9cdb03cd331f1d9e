"""The two movements of rows: into blocks, and into sums of float32 that are rounded once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from moefleet.substrate import gather
from moefleet.substrate.gather import gather_blocks, sum_bags, weighted_sum_bags

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


def table_of(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("small_bytes", [0, 1 << 17], ids=["by_block", "at_once"])
@pytest.mark.parametrize("known", [True, False], ids=["places_known", "places_unknown"])
@pytest.mark.parametrize("counts", [(2, 0, 3, 1), (0, 0, 0, 0), (4, 0, 0, 0), (0, 0, 0, 4), (1, 1, 1, 1)], ids=str)
def test_rows_go_to_their_blocks(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], known: bool, small_bytes: int
) -> None:
    monkeypatch.setattr(gather, "_SMALL_BYTES", small_bytes)
    table, starts = table_of(9, 5), [0, 4, 8, 12]
    rows = np.arange(sum(counts)) * 7 % 9
    places = np.array([at + n for at, count in zip(starts, counts) for n in range(count)], np.int64)
    out = torch.full((16, 5), NAN)
    gather_blocks(table, rows, out, counts, starts, places if known else None)
    wanted = torch.full((16, 5), NAN)
    wanted[places] = table[rows]
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


def test_no_blocks_at_all() -> None:
    gather_blocks(table_of(3, 5), np.zeros(0, np.int64), torch.empty(0, 5), [], [])


def test_bytes_move_like_rows() -> None:
    table = torch.arange(30, dtype=torch.uint8).view(10, 3)
    out = torch.zeros(4, 3, dtype=torch.uint8)
    gather_blocks(table, np.array([9, 1]), out, [1, 1], [0, 3])
    assert out.tolist() == [[27, 28, 29], [0] * 3, [0] * 3, [3, 4, 5]]


ROWS, BAG = np.array([0, 5, 5, 2, 7, 1, 3]), np.array([0, 2, 2, 6, 7, 7])
"""Five bags, two of them empty, one with the same row as its neighbour."""


def expected(table: torch.Tensor, weight: np.ndarray | None = None) -> torch.Tensor:
    """float64 sums."""
    terms = table[torch.from_numpy(ROWS)].double()
    if weight is not None:
        terms *= torch.from_numpy(weight).double()[:, None]
    return torch.stack([terms[lo:hi].sum(0) for lo, hi in pairwise(BAG)])


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_float32_and_rounded_once(dtype: torch.dtype, width: int) -> None:
    table = table_of(8, width, dtype)
    got = sum_bags(table, ROWS, BAG)
    wanted = expected(table)
    assert got.dtype == dtype and got.shape == (5, width)
    once = torch.finfo(dtype).eps / 2 * wanted.abs() + 1e-6
    assert ((got.double() - wanted).abs() <= once).all()
    assert not got[[1, 4]].any(), "an empty bag is exactly 0"


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 19], ids=["bag_by_bag", "all_at_once"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_sums_are_float32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk_bytes: int
) -> None:
    monkeypatch.setattr(gather, "_CHUNK_BYTES", chunk_bytes)
    table, weight = table_of(8, 20, dtype), np.linspace(-2, 1.5, 7, dtype=np.float32)
    out = torch.full((7, 20), 77.0, dtype=dtype)[:5]
    weighted_sum_bags(table, ROWS, weight, BAG, out)
    wanted = expected(table, weight)
    once = torch.finfo(dtype).eps / 2 * wanted.abs() + 2e-6
    assert ((out.double() - wanted).abs() <= once).all()
    assert not out[[1, 4]].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_does_not_lose_small_terms(dtype: torch.dtype) -> None:
    """256 + 256 halves: added one by one in the row type, the halves would vanish from bfloat16."""
    table = torch.full((257, 3), 0.5, dtype=dtype)
    table[0] = 256
    rows, bag = np.arange(257), np.array([0, 257])
    assert sum_bags(table, rows, bag).tolist() == [[384.0] * 3]
    out = torch.empty(1, 3, dtype=dtype)
    weighted_sum_bags(table, rows, np.ones(257, np.float32), bag, out)
    assert out.tolist() == [[384.0] * 3]


def test_rows_that_are_not_named_are_not_read() -> None:
    table = table_of(8, 4)
    table[[4, 6]] = NAN
    out = torch.empty(5, 4)
    weighted_sum_bags(table, ROWS, np.ones(7, np.float32), BAG, out)
    assert out.isfinite().all() and sum_bags(table, ROWS, BAG).isfinite().all()


def test_nothing_to_sum() -> None:
    none = np.zeros(0, np.int64)
    table = table_of(8, 4)
    assert sum_bags(table, none, np.zeros(4, np.int64)).tolist() == [[0.0] * 4] * 3
    assert sum_bags(table, none, np.zeros(1, np.int64)).shape == (0, 4)
    weighted_sum_bags(table, none, np.zeros(0, np.float32), np.zeros(1, np.int64), torch.empty(0, 4))
    out = torch.full((2, 4), NAN)
    weighted_sum_bags(table, none, np.zeros(0, np.float32), np.zeros(3, np.int64), out)
    assert not out.any()
