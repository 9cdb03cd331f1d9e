"""A transformers ``config.json`` as a :class:`ModelShape`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MoEEpConfigError, config_error
from .dense import dense_parameters
from .shape import ModelShape

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
SIZES_INSTEAD = "give the sizes instead: --experts --topk --hidden --intermediate --layers"


def read_model(folder: Path, dtype: str | None = None) -> ModelShape:
    """The shape of the model in this folder, with rows of type ``dtype``, or of the config's.

    Raises:
        MoEEpConfigError: no config.json, one that is no JSON object, or one that is not of a MoE model.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    if path.name != "config.json" or not path.is_file():
        raise config_error("--model", folder, "a folder with a config.json", "name the folder of a downloaded model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise config_error(str(path), f"no readable JSON ({error})", "a transformers config") from error
    if not isinstance(config, dict):
        raise config_error(str(path), f"a {type(config).__name__}", "a JSON object")
    try:
        return shape_of(config if dtype is None else {**config, "dtype": dtype})
    except MoEEpConfigError as error:
        raise MoEEpConfigError(f"{path}: {error}") from error


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape that this config describes; of its ``text_config`` where the experts are there."""
    text = config.get("text_config")
    if isinstance(text, dict) and not any(name in config for name in EXPERTS):
        above: tuple[str, ...] = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
        config = {**text, **{name: config[name] for name in above if name in config}}
    if not any(config.get(name) is not None for name in EXPERTS):
        raise config_error("experts", f"none of {', '.join(EXPERTS)}", "the config of a MoE model", SIZES_INSTEAD)
    layers = moe_layers(config)
    return ModelShape(
        name="".join(c for c in str(config.get("model_type") or "model") if c.isprintable()),
        experts=number(config, EXPERTS),
        topk=number(config, TOPK),
        hidden=number(config, ("hidden_size",)),
        intermediate=number(config, INTERMEDIATE),
        layers=len(layers),
        moe_layers=sum(layers),
        dtype=_dtype(config),
        dense_parameters=dense_parameters(config, number(config, EXPERTS), layers),
        quantized=_quantized(config),
    )


def number(config: dict[str, Any], names: Sequence[str]) -> int:
    """The first of these fields that the config has.

    Raises:
        MoEEpConfigError: it has none, or that is no whole number of at least 1.
    """
    found = [name for name in names if config.get(name) is not None]
    if not found:
        raise config_error(names[0], "nothing" if len(names) == 1 else f"none of {', '.join(names)}", "a whole number")
    value = config[found[0]]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise config_error(found[0], repr(value), "a whole number of at least 1", SIZES_INSTEAD)
    return value


def moe_layers(config: dict[str, Any]) -> list[bool]:
    """For each decoder layer, whether it has routed experts.

    ``first_k_dense_replace`` (DeepSeek): the first layers are dense. ``decoder_sparse_step`` (Qwen),
    ``interleave_moe_layer_step`` (Llama 4): only each n-th has experts, counted from 1; ``moe_layer_freq`` (DeepSeek):
    the same counted from 0, or a list of flags. ``mlp_only_layers`` (Qwen): these are dense.

    Raises:
        MoEEpConfigError: a field of the wrong kind, or no layer with experts.
    """
    count = number(config, ("num_hidden_layers",))
    steps = ("decoder_sparse_step", "interleave_moe_layer_step")
    from_one = number(config, steps) if any(config.get(name) is not None for name in steps) else 1
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or []
    if not isinstance(first, int) or first < 0:
        raise config_error("first_k_dense_replace", repr(first), "a whole number of at least 0")
    if not isinstance(dense, list):
        raise config_error("mlp_only_layers", repr(dense), "a list of layers")
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != count:
            raise config_error("moe_layer_freq", f"{len(frequency)} entries", f"{count}, one for each layer")
        chosen = [bool(flag) for flag in frequency]
    else:
        every = 1 if frequency is None else number(config, ("moe_layer_freq",))
        chosen = [layer % every == 0 for layer in range(count)]
    layers = [
        chosen[layer] and layer >= first and (layer + 1) % from_one == 0 and layer not in dense
        for layer in range(count)
    ]
    if not any(layers):
        raise config_error("layers", f"{count} dense ones and none with experts", "the config of a MoE model")
    return layers


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _quantized(config: dict[str, Any]) -> str:
    found = config.get("quantization_config")
    return str(found.get("quant_method", "quantized")) if isinstance(found, dict) else ""
