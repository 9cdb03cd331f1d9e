"""Experts that return their input: what remains is communication, and its result is known in advance."""

from __future__ import annotations

import torch

from ..config import EpLayout
from ..tensors import DispatchOutput
from ..weights import MoEWeights
from .base import ExpertKernel
from .received import Index, numbers


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
        """Rows of ``out.expert_tensors``' shape in ``out.row_dtype``: in ``into``, which may be the same memory;
        without it ``expert_tensors`` itself (EXPERT_MAJOR, unless they are fp8) or a new tensor. Sums and products are
        float32, those with the scales of fp8 rows too, and rounded once.

        On a GPU the counts are not read, which would wait for the stream: padding is computed along, row by row.
        """
        rows = out.expert_tensors
        if layout is EpLayout.EXPERT_MAJOR and into is None and rows.dtype == out.row_dtype:
            return rows
        result = torch.empty_like(rows, dtype=out.row_dtype) if into is None else into
        if layout is EpLayout.EXPERT_MAJOR:
            for here in _existing(out, layout):
                result[here] = numbers(out, here, result.dtype)
            return result
        ids, factors = out.recv_topk_idx, out.recv_topk_weights
        assert ids is not None and factors is not None, f"{layout.name} brings its routing"
        for here in _existing(out, layout):
            share = torch.where(ids[here] >= 0, factors[here], 0.0).sum(-1, keepdim=True)
            torch.mul(numbers(out, here, torch.float32), share, out=result[here])
        return result


def _existing(out: DispatchOutput, layout: EpLayout) -> list[Index]:
    """Where the rows that exist lie: one index for each block, or everything on a GPU."""
    counts = out.recv_total_counter if layout is EpLayout.FLAT else out.expert_counts
    assert counts is not None, "a DispatchOutput carries expert_counts or recv_total_counter"
    if counts.device.type != "cpu":
        return [...]
    fronts = [slice(count) for count in counts.tolist()]
    return list(fronts) if layout is EpLayout.FLAT else list(enumerate(fronts))
