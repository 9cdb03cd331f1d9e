"""The one interface of expert compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..config import EpLayout, FleetParams, KernelConfig
from ..tensors import DispatchOutput
from ..weights import MoEWeights


class ExpertKernel(ABC):
    """What an expert does to the rows that a dispatch handed over."""

    requires_weights: ClassVar[bool] = True

    def __init__(self, config: KernelConfig) -> None:
        self.config = config

    def validate(self, params: FleetParams, weights: MoEWeights | None) -> None:  # noqa: B027 - optional
        """Raise :class:`MoEEpConfigError` if these weights do not belong to this Fleet."""

    def preprocess(self, weights: MoEWeights | None) -> MoEWeights | None:
        """Bring the weights into the kernel's own form, once, at construction."""
        return weights

    @abstractmethod
    def compute(
        self,
        out: DispatchOutput,
        layout: EpLayout,
        weights: MoEWeights | None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of ``out.expert_tensors``' shape for combine.

        In RANK_MAJOR and FLAT a row is the sum over its local experts of weight times expert output; in EXPERT_MAJOR
        it is the expert's output, unweighted. A local id outside ``[0, L)`` counts as "not here". Only rows that
        exist are computed; rows past a count may hold anything. ``into`` is memory to write them to (combine_buffer).
        """
