"""The experts modules of a model: find them, tell whether moefleet computes what they do, take a rank's share.

Nothing here knows an architecture. An experts module is one whose class transformers decorated with
``use_experts_implementation``; it holds all experts of a block in two parameters, ``gate_up_proj`` ``[E, 2I, H]`` and
``down_proj`` ``[E, H, I]`` (the last two transposed where the module says so), and biases beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...config import GroupedGemmConfig
from ...errors import MoEEpConfigError, config_error
from ...weights import MoEWeightPack, MoEWeights
from .gates import ACTIVATIONS, recognised

DECORATED = ("has_bias", "is_transposed")
"""What the decorator leaves on an instance, in every version."""

PLANES = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WHOLE = "moefleet_num_experts"
"""On a module that was loaded with one rank's experts only: how many there are in all."""


@dataclass(frozen=True)
class Experts:
    """The experts of one block, still in the model: all of them, or those of this rank where no others were loaded.

    Attributes:
        name: of the module inside the model, such as ``model.layers.0.mlp.experts``.
        module: the module.
        gate: what stands between the two matrices.
        interleaved: whether gate and up rows take turns, not gate rows first.
    """

    name: str
    module: nn.Module
    gate: GroupedGemmConfig
    interleaved: bool = False

    @property
    def activation(self) -> str:
        """What is done to the gate half, by its name in :class:`moefleet.GroupedGemmConfig`."""
        return self.gate.activation

    @property
    def is_share(self) -> bool:
        """Whether the module has this rank's experts only."""
        return hasattr(self.module, WHOLE)

    @property
    def form(self) -> tuple[int, int, torch.dtype, torch.device]:
        """What all blocks that share a Fleet have in common: ``E``, ``H``, dtype, device."""
        w13 = self._matrix("gate_up_proj")
        return int(getattr(self.module, WHOLE, w13.shape[0])), w13.shape[2], w13.dtype, w13.device

    def take_share(self, experts: Sequence[int]) -> MoEWeights:
        """Copy the weights of these experts and take all of them out of the module, which frees them."""
        w13, w2, *biases = (self._of(name, experts) for name in planes_of(self.module))
        for name in planes_of(self.module):
            setattr(self.module, name, None)
        if not biases:
            return MoEWeightPack(w13, w2)
        return MoEWeightPack(w13, w2, w13_bias=biases[0], w2_bias=biases[1])

    def _matrix(self, name: str) -> torch.Tensor:
        """``[E, 2I, H]`` or ``[E, H, I]``: a view."""
        weight = getattr(self.module, name).detach()
        return weight.mT if self.module.is_transposed and name in PLANES else weight

    def _of(self, name: str, experts: Sequence[int]) -> torch.Tensor:
        plane = self._matrix(name)
        if not self.is_share:
            plane = plane[torch.tensor(experts, dtype=torch.int64, device=plane.device)]
        if self.interleaved and name in (PLANES[0], BIASES[0]):
            return torch.cat((plane[:, ::2], plane[:, 1::2]), 1).contiguous()
        return plane.contiguous()


def planes_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that hold experts."""
    return (*PLANES, *BIASES) if module.has_bias else PLANES


def experts_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every decorated module with its name, in the order of the model's layers."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in DECORATED)
    ]


def find_experts(model: nn.Module) -> list[Experts]:
    """Every experts module of the model, in the order of its layers. Changes nothing.

    Raises:
        MoEEpConfigError: there is none, they differ in form, or one computes something that moefleet does not.
    """
    found = [_understood(name, module) for name, module in experts_modules(model)]
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


def _understood(name: str, module: nn.Module) -> Experts:
    """An experts module that moefleet can compute; raises for any other."""
    for attribute, usual, got, allowed in (
        ("has_gate", True, "experts without a gate", "gated experts"),
        ("has_post_expert_norm", False, "a norm after each expert", "experts without it"),
        ("_is_expert_parallel", False, "experts that transformers has sharded", "the whole experts"),
    ):
        if getattr(module, attribute, usual) != usual:
            raise _refusal(name, got, allowed)
    for plane in planes_of(module):
        weight = getattr(module, plane, None)
        if not isinstance(weight, torch.Tensor):
            raise _refusal(f"{name}.{plane}", "nothing", "the full experts", "load the model anew for another group")
        dims = 3 if plane in PLANES else 2
        if weight.dim() != dims:
            raise _refusal(f"{name}.{plane}", f"shape {list(weight.shape)}", f"{dims} dimensions, the experts first")
        if weight.dtype not in DTYPES:
            raise _refusal(f"{name}.{plane}", f"dtype {weight.dtype}", "unquantised experts", "dequantise the model")
    w13 = module.gate_up_proj
    assert isinstance(w13, torch.Tensor)
    gate = recognised(module, w13.shape[2 if module.is_transposed else 1])
    if gate is None:
        act = getattr(module, "act_fn", None)
        raise _refusal(name, f"the gate of a {type(module).__name__} ({act})", f"act(gate) * up, {_names()}")
    return Experts(name, module, *gate)


def _names() -> str:
    return "act one of " + ", ".join(ACTIVATIONS) + ", clamped by the module's limit or not"


def _refusal(field: str, got: str, allowed: str, todo: str = "") -> MoEEpConfigError:
    return config_error(f"model: {field}", got, allowed, todo or "this architecture does not run over moefleet yet")
