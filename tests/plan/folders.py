"""Model folders made for a test: configs as transformers writes them, and safetensors files without data."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
SMALL: dict[str, Any] = {
    "model_type": "small",
    "hidden_size": 8,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


def write_config(folder: Path, config: object) -> Path:
    """The folder, with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_weights(path: Path, tensors: dict[str, list[int]], width: int = 2) -> None:
    """A safetensors file whose header says so; there is no data behind it, as nobody reads it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = width
        for each in shape:
            size *= each
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def write_index(folder: Path, files: dict[str, dict[str, list[int]]]) -> None:
    """An index and the files that it names."""
    for file, tensors in files.items():
        write_weights(folder / file, tensors)
    where = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
