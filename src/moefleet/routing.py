"""Routing checks that every transport shares."""

from __future__ import annotations

import torch

from .config import FleetParams
from .errors import config_error
from .tensors import check_tensor

ABSENT = -1
"""A top-k slot that routes nowhere."""


def check_topk_ids(topk_ids: torch.Tensor, params: FleetParams, device: torch.device) -> torch.Tensor:
    """Shape, dtype, device and, on the CPU, the values of ``topk_ids`` ``[T, K]`` (int32 or int64).

    Raises:
        MoEEpConfigError: something is off; ``T > M`` and ``K > max_topk`` included.
    """
    check_tensor("topk_ids", topk_ids, shape=(None, None), dtypes=(torch.int32, torch.int64), device=device)
    tokens, topk = topk_ids.shape
    if tokens > params.max_tokens_per_rank:
        raise config_error(
            "topk_ids",
            f"{tokens} tokens",
            f"at most max_tokens_per_rank = {params.max_tokens_per_rank}",
            f"build the Fleet with max_tokens_per_rank >= {tokens}, or send the batch in parts",
        )
    if not 1 <= topk <= params.max_topk:
        raise config_error("topk_ids", f"K = {topk}", f"1 to max_topk = {params.max_topk}")
    if topk_ids.device.type == "cpu" and topk_ids.numel():
        low, high = torch.aminmax(topk_ids)
        if low < ABSENT or high >= params.num_experts:
            worst = int(low) if low < ABSENT else int(high)
            raise config_error(
                "topk_ids", f"expert id {worst}", f"-1 (no expert) to {params.num_experts - 1}", "check the router"
            )
    return topk_ids


def check_topk_weights(weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """``weights`` ``[T, K]`` beside its ids, as float32 (a copy only if another floating type came)."""
    check_tensor(
        "HandleAlgoKnobTopKWeights.weights",
        weights,
        shape=tuple(topk_ids.shape),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        device=topk_ids.device,
    )
    return weights.to(torch.float32)
