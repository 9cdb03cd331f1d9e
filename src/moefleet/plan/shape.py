"""The sizes of a model that expert parallelism depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import config_error

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of a row element, by the name of its type."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes, in the letters of :mod:`moefleet.config`.

    Attributes:
        name: the model's type, for people.
        experts, topk, hidden, intermediate: ``E``, ``K``, ``H``, ``I``.
        layers, moe_layers: decoder layers in all, and those with routed experts.
        dtype: type of rows, and of weights where no checkpoint says otherwise: a key of ``WIDTH``.
        dense_parameters: weights that are no routed experts, over all layers; ``None`` if unknown.
        quantized: how the config says that weights are stored, or an empty string.

    Raises:
        MoEEpConfigError: a size is out of range.
    """

    name: str
    experts: int
    topk: int
    hidden: int
    intermediate: int
    layers: int
    moe_layers: int
    dtype: str = "bfloat16"
    dense_parameters: int | None = None
    quantized: str = ""

    def __post_init__(self) -> None:
        for name in ("experts", "topk", "hidden", "intermediate", "layers"):
            if getattr(self, name) < 1:
                raise config_error(f"plan {name}", getattr(self, name), "at least 1")
        if self.topk > self.experts:
            raise config_error("plan topk", self.topk, f"1 to {self.experts}, the number of experts")
        if not 1 <= self.moe_layers <= self.layers:
            raise config_error("plan moe_layers", self.moe_layers, f"1 to {self.layers}, the number of layers")
        if self.dtype not in WIDTH:
            raise config_error("plan dtype", repr(self.dtype), ", ".join(WIDTH), "name one of these with --dtype")

    @property
    def dtype_bytes(self) -> int:
        """Width of a row element."""
        return WIDTH[self.dtype]

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer: w13 ``[2I, H]`` and w2 ``[H, I]``."""
        return 3 * self.hidden * self.intermediate
