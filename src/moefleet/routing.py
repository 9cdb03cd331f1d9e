"""Where tokens go: router gates, and the checks of ids and weights that every transport shares.

A gate turns a router's logits into the ids and weights that :class:`moefleet.MoEEpTensors` takes. Each gives what the
router of these models in Hugging Face transformers makes of the same logits, to the bit:

============================ ===============================================================================
Mixtral                      ``SoftmaxGate(K, renormalize=True)``
Qwen2-MoE, Qwen3-MoE, OLMoE  ``SoftmaxGate(K, renormalize=config.norm_topk_prob, round_weights=True)``
gpt-oss                      ``TopKSoftmaxGate(K)``
MiniMax-M2                   ``SigmoidGate(K, renormalize=True)``, called with the model's correction bias
DeepSeek-V3, GLM-4-MoE       ``GroupedGate(K, renormalize=config.norm_topk_prob, routed_scaling_factor=...,
                             n_group=..., topk_group=...)``, called with the model's correction bias
============================ ===============================================================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .config import FleetParams
from .errors import config_error
from .tensors import check_tensor

ABSENT = -1
"""A top-k slot that routes nowhere."""

LOGITS = (torch.float32, torch.bfloat16, torch.float16)


def check_topk_ids(topk_ids: torch.Tensor, params: FleetParams, device: torch.device) -> torch.Tensor:
    """``topk_ids`` ``[T, K]`` (int32 or int64), checked: shape, dtype, device and, on the CPU, the values.

    Raises:
        MoEEpConfigError: something is off; ``T > M`` and ``K > max_topk`` included.
    """
    shape = topk_ids.shape if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() == 2 else (None, None)
    check_tensor("topk_ids", topk_ids, shape=shape, dtypes=(torch.int32, torch.int64), device=device)
    topk_ids = topk_ids.resolve_neg()
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
        values = topk_ids.numpy()
        low, high = int(values.min()), int(values.max())
        if low < ABSENT or high >= params.num_experts:
            worst = low if low < ABSENT else high
            raise config_error(
                "topk_ids", f"expert id {worst}", f"-1 (no expert) to {params.num_experts - 1}", "check the router"
            )
    return topk_ids


def check_topk_weights(weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """``weights`` ``[T, K]`` beside its ids, as float32 (a copy only where that takes one)."""
    check_tensor(
        "HandleAlgoKnobTopKWeights.weights",
        weights,
        shape=topk_ids.shape,
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        device=topk_ids.device,
    )
    return weights.to(torch.float32).resolve_neg()


@dataclass(frozen=True)
class Gate(ABC):
    """A way to choose experts. ``gate(router_logits)`` gives ids int64 ``[T, K]`` and weights float32 ``[T, K]``.

    Args:
        topk: ``K``, experts per token.

    Raises:
        MoEEpConfigError: a value is out of range; at the call, logits that are not ``[T, E]`` or ``E < K``.
    """

    topk: int

    def __post_init__(self) -> None:
        if self.topk < 1:
            raise config_error(f"{type(self).__name__}.topk", self.topk, "at least 1")

    def __call__(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Args: router_logits ``[T, E]`` float32, bfloat16 or float16; ``T`` may be 0."""
        self._check(router_logits)
        return self._choose(router_logits)

    @abstractmethod
    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights for checked logits."""

    def _check(self, logits: torch.Tensor) -> None:
        check_tensor("router_logits", logits, shape=(None, None), dtypes=LOGITS)
        if logits.shape[1] < self.topk:
            raise config_error(f"{type(self).__name__}.topk", self.topk, f"at most the router's E = {logits.shape[1]}")


@dataclass(frozen=True)
class SoftmaxGate(Gate):
    """Softmax over all experts in float32, of which the ``K`` largest are the weights (Mixtral, Qwen-MoE, OLMoE).

    Args:
        renormalize: divide a token's ``K`` weights by their sum.
        round_weights: round the weights to the logits' dtype in the end, as Qwen-MoE and OLMoE do and Mixtral does not.
    """

    renormalize: bool = False
    round_weights: bool = False

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(logits, -1, dtype=torch.float32).topk(self.topk, -1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(logits.dtype).float() if self.round_weights else weights


@dataclass(frozen=True)
class TopKSoftmaxGate(Gate):
    """The ``K`` largest logits, and the softmax over them alone, rounded to the logits' dtype (gpt-oss)."""

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, ids = logits.topk(self.topk, -1)
        return ids, torch.softmax(chosen, -1).float()


@dataclass(frozen=True)
class SigmoidGate(Gate):
    """Each expert's score is the sigmoid of its logit, in float32; the ``K`` best are taken (MiniMax-M2).

    Args:
        renormalize: divide a token's ``K`` weights by their sum.
        routed_scaling_factor: what all weights are multiplied by in the end.
    """

    renormalize: bool = False
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.routed_scaling_factor < math.inf:
            raise config_error(
                f"{type(self).__name__}.routed_scaling_factor", self.routed_scaling_factor, "a number more than 0"
            )

    def __call__(
        self, router_logits: torch.Tensor, e_score_correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Args: router_logits ``[T, E]`` as ever; e_score_correction_bias ``[E]`` of a floating type, what is added to
        the scores to choose experts by, and not to the weights; ``None`` for nothing."""
        self._check(router_logits)
        if e_score_correction_bias is not None:
            shape, device = (router_logits.shape[1],), router_logits.device
            check_tensor("e_score_correction_bias", e_score_correction_bias, shape=shape, dtypes=LOGITS, device=device)
        return self._choose(router_logits, e_score_correction_bias)

    def _choose(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.float().sigmoid()
        candidates = self._candidates(scores if bias is None else scores + bias)
        ids = candidates.topk(self.topk, -1, sorted=False)[1]
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.routed_scaling_factor

    def _candidates(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[T, E]`` with minus infinity for experts that may not be chosen."""
        return scores


@dataclass(frozen=True)
class GroupedGate(SigmoidGate):
    """A :class:`SigmoidGate` that takes experts from a token's best groups alone, to keep it on few nodes.

    Experts form ``n_group`` blocks of equal size. A group is worth the sum of its two best scores, bias included; the
    ``topk_group`` best groups are kept. Source: DeepSeek-V3 Technical Report, section 2.1.2, and its published code.

    Args:
        n_group, topk_group: groups in all, and how many of them a token may use.
    """

    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_group < 1:
            raise config_error("GroupedGate.n_group", self.n_group, "at least 1")
        if not 1 <= self.topk_group <= self.n_group:
            raise config_error("GroupedGate.topk_group", self.topk_group, f"1 to n_group = {self.n_group}")

    def _check(self, logits: torch.Tensor) -> None:
        super()._check(logits)
        experts = logits.shape[1]
        size, rest = divmod(experts, self.n_group)
        if rest or size < 2:
            raise config_error(
                "GroupedGate.n_group", self.n_group, f"a divisor of E = {experts} that leaves groups of 2 or more"
            )
        if self.topk > self.topk_group * size:
            raise config_error(
                "GroupedGate.topk", self.topk, f"at most {self.topk_group * size}: topk_group groups of {size} experts"
            )

    def _candidates(self, scores: torch.Tensor) -> torch.Tensor:
        grouped = scores.unflatten(1, (self.n_group, -1))
        worth = grouped.topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool)
        kept.scatter_(1, worth.topk(self.topk_group, -1, sorted=False)[1], True)
        return grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)
