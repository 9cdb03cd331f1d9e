"""Expert weights of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import config_error


@dataclass(frozen=True)
class UnquantizedMoEWeights:
    """Local experts in a floating-point type.

    Args:
        w13: ``[L, 2I, H]``, gate rows then up rows (transformers' ``gate_up_proj``).
        w2: ``[L, H, I]`` (transformers' ``down_proj``).
        w13_bias, w2_bias: ``[L, 2I]`` and ``[L, H]``, added to what each matrix gives; both or none.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_planes(self.w13, self.w2)
        if self.w13_bias is not None or self.w2_bias is not None:
            _check_bias("w13_bias", self.w13_bias, self.w13)
            _check_bias("w2_bias", self.w2_bias, self.w2)

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        every = (self.w13, self.w2, self.w13_bias, self.w2_bias)
        return tuple(plane for plane in every if plane is not None)

    @property
    def num_local_experts(self) -> int:
        """``L``: experts that this rank holds."""
        return self.w13.shape[0]


@dataclass(frozen=True)
class PrequantizedMoEWeights:
    """Local experts in a quantised format, with the scale plane of each matrix.

    Args:
        w13, w2: as in :class:`UnquantizedMoEWeights`, in the quantised element type.
        w13_scale, w2_scale: their scales; the shapes belong to the format. For kernel ``grouped_gemm``: float8_e4m3fn
            with float32 ``[L, ceil(2I/128), ceil(H/128)]`` and ``[L, ceil(H/128), ceil(I/128)]``, one for each
            128 x 128 block.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def __post_init__(self) -> None:
        _check_planes(self.w13, self.w2)

    @property
    def num_local_experts(self) -> int:
        """``L``: experts that this rank holds."""
        return self.w13.shape[0]


MoEWeights = UnquantizedMoEWeights | PrequantizedMoEWeights


def MoEWeightPack(  # noqa: N802 - a constructor by another name, as in flashinfer.moe_ep
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> MoEWeights:
    """Pack one rank's experts: unquantised without scale planes, prequantised with both.

    Raises:
        MoEEpConfigError: exactly one scale plane, biases beside scales, or shapes that do not belong together.
    """
    if w13_scale is None and w2_scale is None:
        return UnquantizedMoEWeights(w13, w2, w13_bias, w2_bias)
    if w13_bias is not None or w2_bias is not None:
        raise config_error("MoEWeightPack", "biases beside scale planes", "biases of unquantised weights")
    if w13_scale is None or w2_scale is None:
        raise config_error(
            "MoEWeightPack",
            f"only {'w2_scale' if w13_scale is None else 'w13_scale'}",
            "both scale planes, or none",
            "quantised weights need the scales of w13 and of w2",
        )
    return PrequantizedMoEWeights(w13, w2, w13_scale, w2_scale)


def _check_planes(w13: torch.Tensor, w2: torch.Tensor) -> None:
    if w13.dim() != 3 or w13.shape[1] % 2:
        raise config_error("weights.w13", f"shape {list(w13.shape)}", "[L, 2*I, H]")
    experts, twice, hidden = w13.shape
    if tuple(w2.shape) != (experts, hidden, twice // 2):
        raise config_error(
            "weights.w2", f"shape {list(w2.shape)}", f"[L, H, I] = {[experts, hidden, twice // 2]} for this w13"
        )
    if w13.dtype != w2.dtype or w13.device != w2.device:
        raise config_error(
            "weights.w2", f"{w2.dtype} on {w2.device}", f"w13's {w13.dtype} on {w13.device}", "convert one of them"
        )


def _check_bias(name: str, bias: torch.Tensor | None, matrix: torch.Tensor) -> None:
    if bias is None:
        raise config_error(f"weights.{name}", "None", "a bias for both matrices, or for none")
    if bias.shape != matrix.shape[:2]:
        raise config_error(f"weights.{name}", f"shape {list(bias.shape)}", f"{list(matrix.shape[:2])}")
    if bias.dtype != matrix.dtype or bias.device != matrix.device:
        raise config_error(
            f"weights.{name}", f"{bias.dtype} on {bias.device}", f"the matrix's {matrix.dtype} on {matrix.device}"
        )
