"""Experts that return their input: what remains is communication, and its result is known in advance."""

from __future__ import annotations

from types import EllipsisType
from typing import TypeAlias

import torch

from ..config import EpLayout
from ..tensors import DispatchOutput
from ..weights import MoEWeights
from .base import ExpertKernel

Index: TypeAlias = "slice | tuple[int, slice] | EllipsisType"


class IdentityKernel(ExpertKernel):
    """EXPERT_MAJOR returns the rows as they are; RANK_MAJOR and FLAT multiply each by the sum of its local weights.

    The kernel holds no weights and so knows no ``L``: every id from 0 on counts as local.
    """

    requires_weights = False

    def compute(
        self,
        out: DispatchOutput,
        layout: EpLayout,
        weights: MoEWeights | None = None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of ``out.expert_tensors``' shape and dtype: in ``into``, which may be the same memory; without it
        ``expert_tensors`` itself (EXPERT_MAJOR) or a new tensor. Sums and products are float32, rounded once.

        On a GPU the counts are not read, which would wait for the stream: padding is computed along, row by row.
        """
        rows = out.expert_tensors
        if layout is EpLayout.EXPERT_MAJOR:
            if into is None:
                return rows
            for here in _existing(out, layout):
                into[here] = rows[here]
            return into
        result = torch.empty_like(rows) if into is None else into
        ids, factors = out.recv_topk_idx, out.recv_topk_weights
        assert ids is not None and factors is not None, f"{layout.name} brings its routing"
        for here in _existing(out, layout):
            share = torch.where(ids[here] >= 0, factors[here], 0.0).sum(-1, keepdim=True)
            source = rows[here] if rows.itemsize > 1 else rows[here].float()  # torch does not promote float8
            torch.mul(source, share, out=result[here])
        return result


def _existing(out: DispatchOutput, layout: EpLayout) -> list[Index]:
    """Where the rows that exist lie: one index for each block, or everything on a GPU."""
    counts = out.recv_total_counter if layout is EpLayout.FLAT else out.expert_counts
    assert counts is not None, "a DispatchOutput carries expert_counts or recv_total_counter"
    if counts.device.type != "cpu":
        return [...]
    fronts = [slice(count) for count in counts.tolist()]
    return list(fronts) if layout is EpLayout.FLAT else list(enumerate(fronts))
