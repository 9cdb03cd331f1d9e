"""Bytes that a rank needs for a model: predicted from a checkpoint's config alone, and measured on a loaded one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...config import BootstrapConfig, EpAlgorithm, EpLayout, FleetParams, resolve_device
from ...layer import Fleet
from ...placement import Placement
from ...weights import MoEWeights, UnquantizedMoEWeights
from .checkpoint import meta_model
from .experts import experts_modules, find_experts, planes_of


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        dense: everything but the routed experts. On a CPU these lie in the mapped files where the checkpoint has their
            type already, and ranks of one host share them.
        experts: this rank's share of the routed experts, all blocks.
        buffers: the most that the one Fleet's buffers can take, those of the shm transport.
    """

    dense: int
    experts: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.dense + self.experts + self.buffers


def predict_memory(
    path: str | os.PathLike[str],
    world_size: int,
    rank: int,
    *,
    max_tokens_per_rank: int,
    layout: EpLayout | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Memory:
    """What :func:`expert_parallel` with the same values will need on this rank. Reads the config and no weights.

    Args:
        device: that of the bootstrap.

    Raises:
        MoEEpConfigError: not a checkpoint that moefleet can run.
    """
    model = meta_model(path, dtype)
    num_experts, hidden, rows, _ = find_experts(model)[0].form
    own = len(Placement.contiguous(num_experts, world_size).experts_of(rank))
    on = resolve_device(BootstrapConfig(world_size, rank, device=device))
    params = fleet_params(num_experts, max_tokens_per_rank, hidden, rows, layout, on)
    planes = [getattr(module, name) for _, module in experts_modules(model) for name in planes_of(module)]
    every = _bytes(itertools.chain(model.parameters(), model.buffers()))
    whole = sum(plane.nbytes for plane in planes)
    share = sum(plane.nbytes // len(plane) * own for plane in planes)
    return Memory(every - whole, share, buffer_bytes(params, world_size, own))


def fleet_params(
    num_experts: int,
    max_tokens_per_rank: int,
    hidden: int,
    rows: torch.dtype,
    layout: EpLayout | None,
    device: torch.device,
    max_topk: int = 32,
) -> FleetParams:
    """Parameters of the one Fleet of a model.

    Args:
        rows: dtype of its rows.
        layout: ``None`` takes FLAT on a CPU, which moves least there and needs least memory, and else EXPERT_MAJOR.
    """
    if layout is None and device.type == "cpu":
        layout = EpLayout.FLAT
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    return FleetParams(num_experts, max_tokens_per_rank, hidden, rows.itemsize, algorithm, layout, max_topk=max_topk)


def measured(model: nn.Module, weights: Sequence[MoEWeights | None], fleet: Fleet) -> Memory:
    """What a model with spread experts holds."""
    planes = [plane for pack in weights if isinstance(pack, UnquantizedMoEWeights) for plane in pack.planes]
    own = fleet.placement.num_local(fleet.bootstrap.rank)
    return Memory(
        _bytes(itertools.chain(model.parameters(), model.buffers())),
        sum(plane.nbytes for plane in planes),
        buffer_bytes(fleet.params, fleet.bootstrap.world_size, own),
    )


def buffer_bytes(params: FleetParams, world_size: int, own: int) -> int:
    """Two sets of: rows to send, rows that were summed, and rows received, of which only those that arrive are used."""
    most = params.max_tokens_per_rank * world_size
    received = most * own if params.resolved_layout is EpLayout.EXPERT_MAJOR else most
    return 2 * (params.max_tokens_per_rank + most + received) * params.token_hidden_size * params.dtype_bytes


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Each tensor once, also where two names are tied to it."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
