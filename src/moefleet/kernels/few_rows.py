"""Few rows of float32 on a CPU: all that experts make of them in one call of the compiled helper.

Calls are what few rows cost, and this is one.
"""

from __future__ import annotations

import ctypes
import math

import torch

from .. import native
from ..config import GroupedGemmConfig
from ..tensors import DispatchOutput
from ..weights import UnquantizedMoEWeights


class FewRows:
    """Gated experts with biases or without, for gates that begin with silu.

    Args:
        library: the helper.
        config: the gate.
    """

    def __init__(self, library: ctypes.CDLL, config: GroupedGemmConfig) -> None:
        self._experts = library.moefleet_experts
        self._gate = math.inf if config.limit is None else config.limit, config.alpha, config.up_shift

    @classmethod
    def of(cls, config: GroupedGemmConfig) -> FewRows | None:
        """``None`` for another activation, or without the helper."""
        library = native.library() if config.activation == "silu" else None
        return None if library is None else cls(library, config)

    def compute(self, out: DispatchOutput, weights: UnquantizedMoEWeights, result: torch.Tensor, most: int) -> bool:
        """Write what experts make of the rows that exist to ``result``, as ``ExpertKernel.compute`` says.

        Args:
            most: pairs (row, local expert) up to which it is done.

        Returns:
            Whether it was done. If not, nothing has changed: rows are many, or a tensor is not for C to read.
        """
        rows, ids, factors = out.expert_tensors, out.recv_topk_idx, out.recv_topk_weights
        counts = out.recv_total_counter if out.expert_counts is None else out.expert_counts
        w13, w2, b13, b2 = weights.w13, weights.w2, weights.w13_bias, weights.w2_bias
        assert counts is not None, "a DispatchOutput carries expert_counts or recv_total_counter"
        floats = rows, result, w13, w2, b13, b2, factors
        if not (_in_c(torch.float32, *floats) and _in_c(torch.int64, ids) and _in_c(torch.int32, counts)):
            return False
        experts, hidden, inter = w2.shape
        done = self._experts(
            rows.data_ptr(), counts.data_ptr(), counts.numel(), rows.shape[-2], _at(ids), _at(factors),
            0 if ids is None else ids.shape[-1], experts, hidden, inter, w13.data_ptr(), _at(b13), w2.data_ptr(),
            _at(b2), *self._gate, most, result.data_ptr(),
        )  # fmt: skip
        return done > 0


def _in_c(dtype: torch.dtype, *tensors: torch.Tensor | None) -> bool:
    """Whether these are of this type, on the CPU, and their elements side by side, those that are there."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return False
    return True


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
