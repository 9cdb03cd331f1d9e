"""Received rows as numbers, whatever they travelled as."""

from __future__ import annotations

from types import EllipsisType
from typing import TypeAlias

import torch

from .. import quant
from ..tensors import DispatchOutput

Index: TypeAlias = "int | slice | tuple[int, slice] | EllipsisType"


def numbers(out: DispatchOutput, here: Index, dtype: torch.dtype) -> torch.Tensor:
    """``expert_tensors[here]``, as they are; fp8 rows times their scales (without scales: 1) in ``dtype``."""
    scales = None if out.expert_scales is None else out.expert_scales[here]
    return _decoded(out.expert_tensors[here], scales, dtype)


def gathered(out: DispatchOutput, places_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:func:`numbers` of the rows at ``places_N``, which count through all blocks: ``[N, H]``. Nothing else is read."""
    rows, scales = out.expert_tensors.flatten(0, -2), None
    if rows.dtype != quant.ROW_DTYPE:
        return rows.index_select(0, places_N)
    if out.expert_scales is not None:
        scales = out.expert_scales.flatten(0, -2).index_select(0, places_N)
    return _decoded(rows.view(torch.uint8).index_select(0, places_N).view(rows.dtype), scales, dtype)


def _decoded(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if rows.dtype != quant.ROW_DTYPE:
        return rows
    return rows.to(dtype) if scales is None else quant.decode(rows, scales, dtype)
