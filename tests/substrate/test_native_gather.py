"""The movements in C: the same bits as in torch, and nothing beside the table is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefleet import native
from moefleet.substrate.gather import HOST
from moefleet.substrate.native_gather import host_movements
from tests.native.needs import needs_the_helper

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = needs_the_helper


def table_of(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(300, width, generator=torch.Generator().manual_seed(width)).to(dtype)


def strided(table: torch.Tensor) -> list[torch.Tensor]:
    """The same rows as they are, in wider ones, with gaps between elements, and negated lazily."""
    wide = torch.cat([table, table], 1)[:, : table.shape[1]]
    apart = torch.stack([table, table], -1)[..., 0]
    return [table, wide, apart, torch._neg_view(-table)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 5, 72, 2048])
def test_the_same_bits_as_in_torch(width: int, dtype: torch.dtype) -> None:
    dice, table = np.random.default_rng(width), table_of(width, dtype)
    rows, bag = dice.integers(0, 300, 500), np.sort(dice.integers(0, 501, 90))
    bag[0], bag[-1] = 0, 500
    weight = dice.random(500, dtype=np.float32) - np.float32(0.3)
    want, weighted, moved = (torch.full((count, width), 77, dtype=dtype) for count in (89, 89, 600))
    want = HOST.sum_bags(table, rows, bag)
    HOST.weighted_sum_bags(table, rows, weight, bag, weighted)
    HOST.gather_blocks(table, rows, moved, [200, 300], [0, 250])
    ours = host_movements()
    assert ours is not HOST
    for way in strided(table):
        assert torch.equal(ours.sum_bags(way, rows, bag), want)
        out = torch.empty_like(weighted)
        ours.weighted_sum_bags(way, rows, weight, bag, out)
        assert torch.equal(out, weighted)
        for places in (None, np.append(np.arange(200), np.arange(250, 550))):
            out = torch.full_like(moved, 77)
            ours.gather_blocks(way, rows, out, [200, 300], [0, 250], places)
            assert torch.equal(out, moved)


def test_much_goes_past_the_caches() -> None:
    table, rows = table_of(2048, torch.float32), np.arange(900) * 7 % 300
    out = torch.full((900, 2048), float("nan"))
    host_movements().gather_blocks(table, rows, out, [900], [0])
    assert torch.equal(out, table[rows])


@pytest.mark.parametrize("wrong", [300, -1])
def test_rows_outside_the_table_are_refused(wrong: int) -> None:
    ours, table, rows, bag = host_movements(), table_of(5, torch.float32), np.array([0, wrong]), np.array([0, 2])
    out = torch.zeros(2, 5)
    for call in (
        lambda: ours.sum_bags(table, rows, bag),
        lambda: ours.weighted_sum_bags(table, rows, np.ones(2, np.float32), bag, out[:1]),
        lambda: ours.gather_blocks(table, rows, out, [2], [0]),
        lambda: ours.gather_blocks(table, np.array([0, 1]), out, [2], [0], rows),
    ):
        with pytest.raises(IndexError):
            call()
    assert not out.any()


def test_without_the_helper_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert host_movements() is HOST
