"""The values that go into and come out of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import config_error


@dataclass(frozen=True)
class HandleParams:
    """One step's routing.

    Args:
        topk_ids: ``[T, K]`` int32 or int64, global expert ids; ``-1`` is "no expert". ``T`` may be 0.
    """

    topk_ids: torch.Tensor


@dataclass(frozen=True)
class DispatchInputParams:
    """What this rank sends.

    Args:
        x: ``[tokens]`` or ``[tokens, scales]``: tokens ``[T, H]`` in the Fleet's row type, scales ``[T, S]`` of any
            type with ``S * itemsize == scale_bytes_per_token``.
    """

    x: Sequence[torch.Tensor]


@dataclass(frozen=True)
class DispatchOutput:
    """What this rank received. The tensors are views that live until the handle's combine.

    ========================== ================= ============================ ==============================
    field                      LL EXPERT_MAJOR   LL RANK_MAJOR                HT FLAT
    ========================== ================= ============================ ==============================
    ``expert_tensors``         ``[L, M*W, H]``   ``[W, M, H]``                ``[M*W, H]`` (or max_recv)
    ``expert_scales``          ``[L, M*W, S]``   ``[W, M, S]``                ``[M*W, S]``
    ``recv_topk_idx``          None              int64 ``[W, M, K]``          int64 ``[M*W, K]``
    ``recv_topk_weights``      None              float32 ``[W, M, K]``        float32 ``[M*W, K]``
    ``expert_counts``          int32 ``[L]``     int32 ``[W]``                None
    ``recv_total_counter``     None              None                         int32 ``[1]``
    ========================== ================= ============================ ==============================

    Rows are packed: in EXPERT_MAJOR at the front of each expert's block, in RANK_MAJOR at the front of each source
    rank's block, in FLAT at the front of the whole, by source rank. Ids are LOCAL expert indices, ``-1`` where a slot
    belongs to another rank or lies past a count; weights there are 0. Rows past a count are undefined: never read
    them, and never multiply them by zero.

    ``combine_dtype`` is the row type that combine expects where ``expert_tensors`` are fp8 (their numbers are
    ``moefleet.quant.decode(expert_tensors, expert_scales)``), and None where it is that of ``expert_tensors``.
    """

    expert_tensors: torch.Tensor
    recv_topk_idx: torch.Tensor | None = None
    recv_topk_weights: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None
    recv_total_counter: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None
    combine_dtype: torch.dtype | None = None

    @property
    def row_dtype(self) -> torch.dtype:
        """Row type that combine expects."""
        return self.combine_dtype or self.expert_tensors.dtype

    def get_num_tokens(self) -> int:
        """Rows received in all. Reads the counts: on a GPU this waits for the stream, and nothing else here does."""
        counts = self.recv_total_counter if self.expert_counts is None else self.expert_counts
        assert counts is not None, "a DispatchOutput carries expert_counts or recv_total_counter"
        return int(counts.sum())


@dataclass(frozen=True)
class CombineInputParams:
    """What this rank's experts made.

    Args:
        x: ``[rows]`` with the shape of the dispatch's ``expert_tensors``; rows past the counts are never read.
        out: optional result tensor ``[T, H]`` of the rows' dtype.
        out_is_stable: promises that ``out`` keeps its address and is free until the result is read, which lets a
            transport write it from another rank or inside a graph.
    """

    x: Sequence[torch.Tensor]
    out: torch.Tensor | None = None
    out_is_stable: bool = False


@dataclass(frozen=True)
class CombineOutput:
    """The step's result: ``x`` ``[T, H]`` in token order, of the combined rows' dtype. It belongs to the caller."""

    x: torch.Tensor


@dataclass(frozen=True)
class MoEEpTensors:
    """One forward's inputs to :class:`moefleet.MoEEpLayer`.

    Args:
        hidden_states: ``[T, H]``.
        topk_ids: ``[T, K]`` int32 or int64, global expert ids, ``-1`` is "no expert".
        topk_weights: ``[T, K]`` float32 (or castable).
        scales: optional ``[T, S]`` scale rows that travel with the tokens.
        output: optional ``[T, H]`` that the result is written to.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scales: torch.Tensor | None = None
    output: torch.Tensor | None = None


def is_plain(tensor: object, shape: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device | None) -> bool:
    """Whether nothing about a tensor needs a closer look: these values, no gradient, its elements side by side.

    A quick yes on the way of every step. After a no, :func:`check_tensor` says whether anything is wrong. ``None`` as
    ``device`` is the CPU, for which a tensor is asked faster.
    """
    try:
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype in dtypes
            and tensor.shape == shape
            and (tensor.is_cpu if device is None else tensor.device == device)
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and not tensor.is_neg()
        )
    except RuntimeError:  # a nested tensor has no shape
        return False


def check_tensor(
    field: str,
    tensor: object,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Raise :class:`MoEEpConfigError` unless ``tensor`` has this shape (``None``: any size), dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise config_error(field, f"a {type(tensor).__name__}", "a torch.Tensor")
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device:
        return tensor
    want = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    if tensor.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, tensor.shape, strict=True)):
        raise config_error(field, f"shape {list(tensor.shape)}", f"shape {want}")
    if tensor.dtype not in dtypes:
        raise config_error(field, f"dtype {tensor.dtype}", " or ".join(str(d) for d in dtypes))
    if device is not None and (
        tensor.device.type != device.type
        or (device.type != "cpu" and device.index not in (None, tensor.device.index))  # "cuda" is any of them
    ):
        raise config_error(field, f"device {tensor.device}", f"device {device}", f"move it with .to({str(device)!r})")
    return tensor
