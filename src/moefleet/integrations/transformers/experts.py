"""The experts modules of a model: find them, tell whether moefleet computes what they do, take a rank's share.

Nothing here knows an architecture. An experts module is one whose class transformers decorated with
``use_experts_implementation``; it holds all experts of a block in two parameters, ``gate_up_proj`` ``[E, 2I, H]`` and
``down_proj`` ``[E, H, I]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import MoEEpConfigError, config_error
from ...weights import MoEWeightPack, MoEWeights

DECORATED = ("has_gate", "has_bias", "is_transposed")
"""What the decorator leaves on an instance."""

PLANES = ("gate_up_proj", "down_proj")

# GroupedGemmConfig.activation -> what it does to the gate half.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Experts:
    """All experts of one block, still in the model.

    Attributes:
        name: of the module inside the model, such as ``model.layers.0.mlp.experts``.
        module: the module.
        activation: what it does to the gate half, by its name in :class:`moefleet.GroupedGemmConfig`.
    """

    name: str
    module: nn.Module
    activation: str

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """``[E, 2I, H]``."""
        weight = self.module.gate_up_proj
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def down_proj(self) -> torch.Tensor:
        """``[E, H, I]``."""
        weight = self.module.down_proj
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def form(self) -> tuple[int, int, torch.dtype, torch.device]:
        """What all blocks that share a Fleet have in common: ``E``, ``H``, dtype, device."""
        w13 = self.gate_up_proj
        return w13.shape[0], w13.shape[2], w13.dtype, w13.device

    def take_share(self, experts: Sequence[int]) -> MoEWeights:
        """Copy the weights of these experts and take all of them out of the module, which frees them."""
        at = torch.tensor(experts, dtype=torch.int64, device=self.gate_up_proj.device)
        share = MoEWeightPack(self.gate_up_proj.detach()[at], self.down_proj.detach()[at])
        for plane in PLANES:
            setattr(self.module, plane, None)
        return share


def find_experts(model: nn.Module) -> list[Experts]:
    """Every experts module of the model, in the order of its layers. Changes nothing.

    Raises:
        MoEEpConfigError: there is none, they differ in form, or one computes something that moefleet does not.
    """
    found = []
    for name, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in DECORATED):
            found.append(Experts(name, module, _understood(name, module)))
    if not found:
        raise config_error(
            "model",
            f"a {type(model).__name__} without experts modules",
            "a MoE model whose experts go through transformers' experts registry",
            "see which of its modules hold the experts",
        )
    for experts in found:
        if experts.form != found[0].form:
            raise _refusal(
                experts.name,
                "E, H, dtype, device = {}, {}, {}, {}".format(*experts.form),
                "those of {}: {}, {}, {}, {}".format(found[0].name, *found[0].form),
            )
    return found


def _understood(name: str, module: nn.Module) -> str:
    """The activation of an experts module that moefleet can compute; raises for any other."""
    for attribute, usual, got, allowed in (
        ("has_gate", True, "experts without a gate", "gated experts"),
        ("has_bias", False, "experts with biases", "experts without biases"),
        ("is_transposed", False, "transposed weights", "gate_up_proj [E, 2I, H] and down_proj [E, H, I]"),
        ("is_concatenated", True, "interleaved gate and up rows", "gate rows, then up rows"),
        ("has_post_expert_norm", False, "a norm after each expert", "experts without it"),
        ("_is_expert_parallel", False, "experts that transformers has sharded", "the whole experts"),
    ):
        if getattr(module, attribute, usual) != usual:
            raise _refusal(name, got, allowed)
    for plane in PLANES:
        weight = getattr(module, plane, None)
        if weight is None:
            raise _refusal(f"{name}.{plane}", "nothing", "the full experts", "load the model anew for another group")
        if weight.dim() != 3:
            raise _refusal(f"{name}.{plane}", f"shape {list(weight.shape)}", "three dimensions, the experts first")
    activation = _activation(module)
    if activation is None:
        act = getattr(module, "act_fn", None)
        raise _refusal(name, f"the gate of a {type(module).__name__} ({act})", f"act(gate) * up, {_names()}")
    return activation


def _activation(module: nn.Module) -> str | None:
    """Name the gate by what it computes, as classes and functions for one activation are many, and gates of their own
    (limits, scales) are not told by them.
    """
    weight, apply_gate = module.gate_up_proj, module._apply_gate
    assert isinstance(weight, torch.Tensor) and callable(apply_gate)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(32, weight.shape[1], generator=generator) * torch.logspace(-2, 3, 32)[:, None]
    probe = probe.to(weight.device)
    gate, up = probe.chunk(2, dim=-1)
    with torch.no_grad():
        got = apply_gate(probe)
        for name, activation in ACTIVATIONS.items():
            if torch.allclose(got, activation(gate) * up, rtol=1e-5, atol=1e-6):
                return name
    return None


def _names() -> str:
    return "act one of " + ", ".join(ACTIVATIONS)


def _refusal(field: str, got: str, allowed: str, todo: str = "") -> MoEEpConfigError:
    return config_error(f"model: {field}", got, allowed, todo or "this architecture does not run over moefleet yet")
