"""Options of a Fleet or a Handle as frozen values. A knob that a transport cannot honour is an error, never ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .config import FleetParams
from .errors import config_error

FP8E4M3 = "FP8E4M3"
"""Name of the one format that FleetAlgoKnobQuantization knows."""

QUANTISED_BLOCK = 128
"""Columns of a row that share a scale in that format."""


@dataclass(frozen=True)
class FleetAlgoKnob:
    """Base of the options given at a Fleet's construction."""


@dataclass(frozen=True)
class HandleAlgoKnob:
    """Base of the options given at a Handle's creation or update."""


@dataclass(frozen=True)
class FleetAlgoKnobFaultTolerance(FleetAlgoKnob):
    """Keep serving when ranks die, stop or come late.

    Args:
        enabled: ``False`` is the same as not giving the knob.
        timeout_ms: silence after which a peer is accused; 0 takes the transport's documented default.
        reconcile_timeout_s: longest wait for the views of a round.
        coordinator_takeover_s: how long the rank whose turn it is may take to offer a decision.
        renormalize: rescale rows that lost some of their experts by (sum of all weights) / (sum of live ones).
        quorum: ``"majority"`` or ``"any"``.
        supervised: under torchrun: whether something else keeps the other workers running when one ends. torchrun by
            itself ends them all, so that nothing is left to tolerate; fault tolerance is then refused.
    """

    enabled: bool = True
    timeout_ms: int = 0
    reconcile_timeout_s: float = 30.0
    coordinator_takeover_s: float = 10.0
    renormalize: bool = False
    quorum: Literal["majority", "any"] = "majority"
    supervised: bool = False

    def __post_init__(self) -> None:
        if self.timeout_ms < 0:
            raise config_error("FleetAlgoKnobFaultTolerance.timeout_ms", self.timeout_ms, "0 (default) or more")
        for name in ("reconcile_timeout_s", "coordinator_takeover_s"):
            if not getattr(self, name) > 0:
                raise config_error(f"FleetAlgoKnobFaultTolerance.{name}", getattr(self, name), "more than 0 seconds")
        if self.quorum not in ("majority", "any"):
            raise config_error("FleetAlgoKnobFaultTolerance.quorum", self.quorum, '"majority" or "any"')


@dataclass(frozen=True)
class FleetAlgoKnobTopologyCapacity(FleetAlgoKnob):
    """Most ranks that the Fleet may ever grow to: ``n`` at least the world size."""

    n: int

    def __post_init__(self) -> None:
        _positive(self, "n")


@dataclass(frozen=True)
class FleetAlgoKnobQuantization(FleetAlgoKnob):
    """The number format that the transport quantises rows to in flight, as a set of one name.

    ``{"FP8E4M3"}``: bfloat16, float16 or float32 tokens travel, and arrive, as float8_e4m3fn with float32 scales of 128
    columns each (:mod:`moefleet.quant.fp8`), this rank's own too. Combine's rows stay in the callers' row type.
    ``FleetParams.dtype_bytes`` is the width of that type, and ``scale_bytes_per_token`` 0.
    """

    quants: frozenset[str]

    def __post_init__(self) -> None:
        if isinstance(self.quants, str):  # a set of letters otherwise
            raise config_error(
                "FleetAlgoKnobQuantization.quants", repr(self.quants), "a set of names", "put it in braces"
            )
        object.__setattr__(self, "quants", frozenset(self.quants))


@dataclass(frozen=True)
class FleetAlgoKnobNumChannelsPerRank(FleetAlgoKnob):
    """Communication channels (or thread blocks) per rank."""

    n: int

    def __post_init__(self) -> None:
        _positive(self, "n")


@dataclass(frozen=True)
class FleetAlgoKnobNumQpsPerRank(FleetAlgoKnob):
    """RDMA queue pairs per rank."""

    n: int

    def __post_init__(self) -> None:
        _positive(self, "n")


@dataclass(frozen=True)
class FleetAlgoKnobRdmaBufferSize(FleetAlgoKnob):
    """Bytes of registered RDMA memory."""

    bytes_: int

    def __post_init__(self) -> None:
        _positive(self, "bytes_")


@dataclass(frozen=True)
class FleetAlgoKnobAllocator(FleetAlgoKnob):
    """Where a transport's private buffers come from: torch's caching allocator, or the transport's own."""

    torch_caching: bool = False


@dataclass(frozen=True)
class HandleAlgoKnobTopKWeights(HandleAlgoKnob):
    """Routing weights, given at creation in every layout: ``weights`` float32 (or castable) ``[T, K]``."""

    weights: torch.Tensor


@dataclass(frozen=True)
class HandleAlgoKnobUserStream(HandleAlgoKnob):
    """Raw handle of the CUDA stream that this handle's work goes to."""

    stream: int


@dataclass(frozen=True)
class HandleAlgoKnobSplitOperation(HandleAlgoKnob):
    """``dispatch`` and ``combine`` return after their send half; ``complete()`` runs the receive half."""


@dataclass(frozen=True)
class HandleAlgoKnobNumReceivedTokens(HandleAlgoKnob):
    """HT: rows this rank will receive, if the caller already knows, so that nothing need be read back."""

    target: int

    def __post_init__(self) -> None:
        if self.target < 0:
            raise config_error("HandleAlgoKnobNumReceivedTokens.target", self.target, "0 or more")


def _positive(knob: FleetAlgoKnob, field: str) -> None:
    if getattr(knob, field) < 1:
        raise config_error(f"{type(knob).__name__}.{field}", getattr(knob, field), "at least 1")


@dataclass(frozen=True)
class RowFormat:
    """How rows travel: what FleetParams and FleetAlgoKnobQuantization say together.

    Attributes:
        hidden: ``H``.
        quantised: whether the transport makes fp8 rows and their scales of what it is given.
        there_bytes, back_bytes: width of a row element in dispatch and in combine.
        scale_bytes: bytes of the scales that travel with a token in dispatch.
    """

    hidden: int
    quantised: bool
    there_bytes: int
    back_bytes: int
    scale_bytes: int

    @classmethod
    def of(cls, params: FleetParams, algo_knobs: Sequence[FleetAlgoKnob] = ()) -> RowFormat:
        """The format of a Fleet with these parameters and knobs."""
        hidden, back = params.token_hidden_size, params.combine_bytes
        if any(isinstance(knob, FleetAlgoKnobQuantization) for knob in algo_knobs):
            return cls(hidden, True, 1, back, 4 * -(-hidden // QUANTISED_BLOCK))
        return cls(hidden, False, params.dtype_bytes, back, params.scale_bytes_per_token)

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row and its scales in dispatch."""
        return self.hidden * self.there_bytes + self.scale_bytes

    @property
    def returned_bytes(self) -> int:
        """Bytes of a row in combine."""
        return self.hidden * self.back_bytes
