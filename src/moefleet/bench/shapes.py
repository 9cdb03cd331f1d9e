"""Sizes of well-known models, by name, or of a checkpoint's folder, and whether a layer of them fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import config_error
from ..plan.configs import read_model
from ..plan.shape import ModelShape
from ..plan.words import in_bytes
from ..substrate.memory import available_bytes
from .layers import LayerCase

SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("mixtral-8x7b", 8, 2, 4096, 14336, layers=32, moe_layers=32),
        ModelShape("mixtral-8x22b", 8, 2, 6144, 16384, layers=56, moe_layers=56),
        ModelShape("olmoe", 64, 8, 2048, 1024, layers=16, moe_layers=16),
        ModelShape("qwen3-30b-a3b", 128, 8, 2048, 768, layers=48, moe_layers=48),
        ModelShape("qwen3-235b-a22b", 128, 8, 4096, 1536, layers=94, moe_layers=94),
        ModelShape("deepseek-v2-lite", 64, 6, 2048, 1408, layers=27, moe_layers=26),
        ModelShape("deepseek-v3", 256, 8, 7168, 2048, layers=61, moe_layers=58),
    )
}


def find_shape(model: str) -> ModelShape:
    """The sizes of this model.

    Args:
        model: a key of :data:`SHAPES`, or a folder with a ``config.json``.

    Raises:
        MoEEpConfigError: it is neither.
    """
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    if not Path(model).exists():
        raise config_error("--model", repr(model), ", ".join(SHAPES) + ", or a folder with a config.json")
    return read_model(Path(model))


def scaled(shape: ModelShape, **changes: int | None) -> tuple[ModelShape, str]:
    """A shape with other sizes, and a name that says so.

    Args:
        changes: ``experts``, ``topk``, ``hidden`` or ``intermediate``; ``None`` keeps the model's, and of ``topk`` as
            many as there are experts.
    """
    wanted = {name: value for name, value in changes.items() if value is not None and value != getattr(shape, name)}
    if changes.get("topk") is None and wanted.get("experts", shape.topk) < shape.topk:
        wanted["topk"] = wanted["experts"]
    if not wanted:
        return shape, shape.name
    said = ", ".join(f"{name} {value} of {getattr(shape, name)}" for name, value in wanted.items())
    return replace(shape, **wanted), f"{shape.name} scaled ({said})"  # type: ignore[arg-type]


def require_memory(cases: Sequence[LayerCase], device: str = "cpu") -> None:
    """Raise :class:`MoEEpConfigError` where the experts of a case do not fit the memory.

    Args:
        device: ``"cpu"``: all of them this machine's; ``"cuda"``: those of a rank its GPU's.
    """
    on_gpu = device == "cuda"
    try:
        available = torch.cuda.get_device_properties(0).total_memory if on_gpu else available_bytes()
    except OSError:  # no /proc: not Linux
        return
    for case in cases:
        experts = -(-case.experts // case.world) if on_gpu else case.experts
        if experts * case.expert_bytes > available:
            raise config_error(
                f"--model {case.model}",
                f"{in_bytes(experts * case.expert_bytes)} for {experts} experts of one layer",
                f"{in_bytes(available)}, the memory {'of a GPU' if on_gpu else 'that is free'}",
                "scale it down with --experts, --hidden or --intermediate",
            )
