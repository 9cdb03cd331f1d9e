"""How many weights of a model are no routed experts: every rank holds all of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def dense_parameters(config: dict[str, Any], experts: int, has_experts: Sequence[bool]) -> int | None:
    """Embeddings, attention, routers, shared experts, dense MLPs; norms and biases, far below a percent, are left out.

    Args:
        config: a transformers config.
        experts: ``E``, the width of a router.
        has_experts: for each decoder layer, whether it has routed experts.

    Returns:
        ``None`` if the config lacks a size.
    """
    try:
        hidden = config["hidden_size"]
        tables = 1 if config.get("tie_word_embeddings") else 2
        total = tables * config["vocab_size"] * hidden + len(has_experts) * _attention(config, hidden)
        sparse = sum(has_experts)
        total += sparse * hidden * (experts + 3 * _shared(config))
        if sparse < len(has_experts):
            width = config.get("intermediate_size_mlp") or config["intermediate_size"]
            total += (len(has_experts) - sparse) * 3 * hidden * width
        return int(total)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _attention(config: dict[str, Any], hidden: int) -> int:
    """Of one layer: latent attention (DeepSeek), where the config has its ranks, or heads that share keys."""
    heads = config["num_attention_heads"]
    if rank := config.get("kv_lora_rank"):
        plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        key = heads * (plain + rotary)
        q_rank = config.get("q_lora_rank")
        queries = hidden * key if not q_rank else q_rank * (hidden + key)
        return int(queries + hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden)
    head = config.get("head_dim") or hidden // heads
    return int(2 * hidden * head * (heads + (config.get("num_key_value_heads") or heads)))


def _shared(config: dict[str, Any]) -> int:
    """Intermediate size of the shared experts of a layer together, 0 without any."""
    if size := config.get("shared_expert_intermediate_size"):
        return int(size)
    return int((config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0))
