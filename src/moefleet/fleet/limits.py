"""What a transport can do, as data, and the one place where parameters are held against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..config import EpLayout, FleetParams
from ..errors import config_error
from ..knobs import FleetAlgoKnob, FleetAlgoKnobQuantization


@dataclass(frozen=True)
class Limits:
    """Bounds of a transport. ``None`` means unbounded.

    Attributes:
        device_types: ``torch.device.type`` values that its tensors may have.
        layouts: those it implements.
        dtype_bytes: widths of a row element that it carries.
        max_world_size, max_topk, max_tokens_per_rank, max_hidden: upper bounds, in ranks, slots, tokens, elements.
        hidden_multiple: ``H`` must divide by this.
        hidden_sizes: the only hidden sizes, where the library has a fixed list.
        experts_divisible: ``E`` must divide by ``W``.
        scales: whether scale rows may travel with the tokens.
        quants: number formats that it quantises rows to in flight (FleetAlgoKnobQuantization).
    """

    device_types: frozenset[str]
    layouts: frozenset[EpLayout]
    dtype_bytes: frozenset[int] = field(default=frozenset({2, 4}))
    max_world_size: int | None = None
    max_topk: int | None = None
    max_tokens_per_rank: int | None = None
    max_hidden: int | None = None
    hidden_multiple: int = 1
    hidden_sizes: frozenset[int] | None = None
    experts_divisible: bool = False
    scales: bool = True
    quants: frozenset[str] = frozenset()


def check_limits(
    name: str,
    limits: Limits,
    params: FleetParams,
    world_size: int,
    device: torch.device,
    algo_knobs: Sequence[FleetAlgoKnob] = (),
) -> None:
    """Raise :class:`MoEEpConfigError` for the first parameter or number format that ``name`` cannot serve."""

    def refuse(field_name: str, got: object, allowed: object, todo: str = "choose another backend") -> None:
        raise config_error(f"{name}: {field_name}", got, str(allowed), todo)

    if device.type not in limits.device_types:
        refuse("device", device, " or ".join(sorted(limits.device_types)))
    if params.resolved_layout not in limits.layouts:
        refuse("layout", params.resolved_layout.name, " or ".join(sorted(layout.name for layout in limits.layouts)))
    if params.dtype_bytes not in limits.dtype_bytes:
        refuse("dtype_bytes", params.dtype_bytes, " or ".join(map(str, sorted(limits.dtype_bytes))))
    for field_name, got, most in (
        ("world_size", world_size, limits.max_world_size),
        ("max_topk", params.max_topk, limits.max_topk),
        ("max_tokens_per_rank", params.max_tokens_per_rank, limits.max_tokens_per_rank),
        ("token_hidden_size", params.token_hidden_size, limits.max_hidden),
    ):
        if most is not None and got > most:
            refuse(field_name, got, f"at most {most}")
    hidden = params.token_hidden_size
    if hidden % limits.hidden_multiple:
        refuse(
            "token_hidden_size",
            hidden,
            f"a multiple of {limits.hidden_multiple}",
            "pad the rows, or choose another backend",
        )
    if limits.hidden_sizes is not None and hidden not in limits.hidden_sizes:
        refuse("token_hidden_size", hidden, sorted(limits.hidden_sizes), "pad the rows, or choose another backend")
    if limits.experts_divisible and params.num_experts % world_size:
        refuse("num_experts", f"{params.num_experts} over {world_size} ranks", f"a multiple of {world_size}")
    if params.scale_bytes_per_token and not limits.scales:
        refuse("scale_bytes_per_token", params.scale_bytes_per_token, "0")
    for knob in algo_knobs:
        if isinstance(knob, FleetAlgoKnobQuantization):
            _check_quantization(knob, limits, params, refuse)


def _check_quantization(
    knob: FleetAlgoKnobQuantization, limits: Limits, params: FleetParams, refuse: Callable[..., None]
) -> None:
    if len(knob.quants) != 1 or not knob.quants <= limits.quants:
        allowed = " or ".join(f"{{{quant!r}}}" for quant in sorted(limits.quants)) or "rows as they are"
        refuse("FleetAlgoKnobQuantization.quants", f"{{{', '.join(map(repr, sorted(knob.quants)))}}}", allowed)
    if params.dtype_bytes == 1:
        refuse(
            "dtype_bytes with FleetAlgoKnobQuantization",
            1,
            "2 or 4, the width of the rows that are to be quantised",
            "leave the knob out where rows are fp8 already",
        )
    if params.scale_bytes_per_token:
        refuse(
            "scale_bytes_per_token with FleetAlgoKnobQuantization",
            params.scale_bytes_per_token,
            "0",
            "the transport makes the scales itself, and leaves no place for others",
        )
