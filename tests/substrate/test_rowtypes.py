"""Row types and their numbers in headers."""

from __future__ import annotations

import itertools

import torch

from moefleet.substrate.rowtypes import DTYPES, code_name, row_code

SCALES = (None, torch.float32, torch.uint8, torch.float8_e8m0fnu, torch.int64)


def test_every_type_has_a_number_of_its_own_and_a_name() -> None:
    rows = [dtype for group in DTYPES.values() for dtype in group]
    pairs = list(itertools.product(rows, SCALES))
    codes = [row_code(*pair) for pair in pairs]
    assert len(set(codes)) == len(pairs) and min(codes) > 0
    for (dtype, scales), code in zip(pairs, codes):
        assert code_name(code) == (f"{dtype} with {scales} scales" if scales else str(dtype))


def test_widths_are_those_of_the_types() -> None:
    assert all(dtype.itemsize == width for width, group in DTYPES.items() for dtype in group)


def test_scales_of_an_unknown_type_are_bytes() -> None:
    assert row_code(torch.float32, torch.complex64) == row_code(torch.float32, torch.bool)
    assert code_name(row_code(torch.float32, torch.bool)) == "torch.float32 with other scales"
    assert code_name(15) == "row code 15"
