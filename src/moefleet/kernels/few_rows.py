"""Few rows of float32 on a CPU, RANK_MAJOR and FLAT: the compiled helper's products around torch's gate.

Calls are what few rows cost: this is two of the helper, and those of the gate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import native
from ..tensors import DispatchOutput
from ..weights import UnquantizedMoEWeights

MOST_PAIRS = 8
"""Pairs (row, expert) for each local expert, on average, up to which this was measured to be faster."""


def compute(
    out: DispatchOutput,
    weights: UnquantizedMoEWeights,
    gated: Callable[[torch.Tensor], torch.Tensor],
    result: torch.Tensor,
) -> bool:
    """Write what experts make of the rows that exist to ``result``, if they are few and C can read all of it.

    Args:
        gated: what stands between an expert's matrices: ``[N, 2I]`` to ``[N, I]``.

    Returns:
        Whether it did. If not, nothing has changed.
    """
    library = native.library()
    rows, ids, factors = out.expert_tensors, out.recv_topk_idx, out.recv_topk_weights
    counts = out.recv_total_counter if out.expert_counts is None else out.expert_counts
    w13, w2, b13, b2 = weights.w13, weights.w2, weights.w13_bias, weights.w2_bias
    assert ids is not None and factors is not None and counts is not None
    if library is None or torch.get_num_threads() > 1:
        return False
    if not (
        rows.dtype is w13.dtype is w2.dtype is result.dtype is factors.dtype is torch.float32
        and rows.is_contiguous()
        and ids.is_contiguous()
        and factors.is_contiguous()
        and result.is_contiguous()
        and w13.is_contiguous()
        and w2.is_contiguous()
    ):
        return False
    experts, hidden, inter = w2.shape
    blocks, capacity, topk = len(counts), rows.shape[-2], ids.shape[-1]
    most = MOST_PAIRS * experts
    plan, h = torch.empty(experts + 2 * most, dtype=torch.int64), torch.empty(most, 2 * inter)
    pairs = library.moefleet_expand(
        rows.data_ptr(), hidden, counts.data_ptr(), blocks, capacity, ids.data_ptr(), topk, experts,
        w13.data_ptr(), None if b13 is None else b13.data_ptr(), hidden, 2 * inter, plan.data_ptr(), most, h.data_ptr(),
    )  # fmt: skip
    if pairs < 0:
        return False
    a, y = gated(h[:pairs]), torch.empty(pairs, hidden)
    library.moefleet_contract(
        a.data_ptr(), plan.data_ptr(), most, counts.data_ptr(), blocks, capacity, ids.data_ptr(), factors.data_ptr(),
        topk, experts, w2.data_ptr(), None if b2 is None else b2.data_ptr(), inter, hidden, y.data_ptr(),
        result.data_ptr(), 4 * hidden,
    )  # fmt: skip
    return True
