"""What stands between an expert's two matrices, told by what it computes.

Classes and functions for one activation are many, and gates of their own (limits, scales, rows that take turns) are
not told by them: a module's ``_apply_gate`` is run on a probe and compared with each gate that moefleet knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from ...config import GroupedGemmConfig

# GroupedGemmConfig.activation -> what it does to the gate half.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu": F.relu,
}

# Where modules and their configs keep the numbers of a gate.
LIMITS = ("limit", "swiglu_limit")
ALPHAS = ("alpha", "swiglu_alpha")


def recognised(module: nn.Module, width: int) -> tuple[GroupedGemmConfig, bool] | None:
    """The gate of an experts module whose ``h`` is ``[N, width]``, and whether its rows take turns, or ``None``."""
    apply_gate = module._apply_gate
    assert callable(apply_gate)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(32, width, generator=generator) * torch.logspace(-2, 3, 32)[:, None]
    with torch.no_grad():
        got = apply_gate(probe.clone())
        for config in candidates(module):
            for interleaved in (False, True):
                gate, up = (probe[:, ::2], probe[:, 1::2]) if interleaved else probe.chunk(2, -1)
                if torch.allclose(got, computed(config, gate, up), rtol=1e-5, atol=1e-6):
                    return config, interleaved
    return None


def candidates(module: nn.Module) -> Iterator[GroupedGemmConfig]:
    """Every gate that a module with these numbers may have, the plain ones first."""
    limits, alphas = numbers(module, LIMITS), numbers(module, ALPHAS)
    for limit, shift, alpha in itertools.product((None, *limits), (0.0, 1.0), (1.0, *alphas)):
        for name in ACTIVATIONS:
            if alpha == 1.0 or name == "silu":
                yield GroupedGemmConfig(name, limit=limit, alpha=alpha, up_shift=shift)


def numbers(module: nn.Module, names: tuple[str, ...]) -> list[float]:
    """What the module and its config have under these names."""
    found = (getattr(holder, name, None) for holder in (module, module.config) for name in names)
    return list(dict.fromkeys(float(value) for value in found if isinstance(value, (int, float)) and value > 0))


def computed(config: GroupedGemmConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What :class:`GroupedGemmConfig` says."""
    if config.limit is not None:
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    activated = ACTIVATIONS[config.activation](gate)
    if config.alpha != 1.0:
        activated = gate * torch.sigmoid(config.alpha * gate)
    return activated * (up + config.up_shift)
