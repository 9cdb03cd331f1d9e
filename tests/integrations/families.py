"""A tiny random model of each family, the same weights in every process."""

from __future__ import annotations

from typing import Any

import torch
import transformers

E, H, INTER, V = 8, 32, 16, 64  # experts, hidden, expert intermediate, vocabulary

COMMON = dict(
    vocab_size=V,
    hidden_size=H,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
DEEPSEEK = dict(
    num_key_value_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
GROUPED = dict(n_routed_experts=E, n_shared_experts=1, first_k_dense_replace=0, moe_intermediate_size=INTER)

# Name -> config class, model class, and what its config has beside COMMON.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(num_experts=E, moe_intermediate_size=INTER)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        dict(num_experts=E, moe_intermediate_size=INTER, shared_expert_intermediate_size=24, intermediate_size=24),
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=E, intermediate_size=INTER)),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", dict(num_experts=E, intermediate_size=INTER, norm_topk_prob=True)),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", GROUPED | DEEPSEEK),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", GROUPED | dict(head_dim=16)),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", dict(num_local_experts=E, intermediate_size=INTER, head_dim=16)),
}


def tiny(family: str, dtype: torch.dtype = torch.float32, *, topk: int = 2, **changes: Any) -> Any:
    """A model whose tokens go to ``topk`` experts, of some groups where its router has groups and ``topk < E``."""
    config_class, model_class, own = FAMILIES[family]
    groups = dict(n_group=4, topk_group=4 if topk == E else 2) if "n_routed_experts" in own else {}
    values = COMMON | own | groups | dict(num_experts_per_tok=topk) | changes
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**values))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name:
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    return model.to(dtype).eval()
