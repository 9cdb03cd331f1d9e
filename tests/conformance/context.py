"""What a function of this suite has at hand while it runs on a rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    DispatchOutput,
    Fleet,
    FleetParams,
    Handle,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    NVLinkConfig,
    create_fleet,
    reference,
)
from moefleet.config import CommConfig
from moefleet.fleet import Meeting
from moefleet.knobs import FleetAlgoKnob, HandleAlgoKnob
from tests.strategies import Problem

WAIT_S = 30.0
"""Longest wait of a Fleet under test for a peer: only a hang takes that long."""
GPU_WAIT_S = 60.0
"""The same where a peer may be compiling kernels."""
NAN = float("nan")


class Received(NamedTuple):
    """A DispatchOutput by value, on the CPU; scales as bytes, since not every type of theirs can be pickled."""

    rows: torch.Tensor
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    counts: torch.Tensor | None
    total: torch.Tensor | None
    scales: torch.Tensor | None


@dataclass
class RankContext:
    """One rank, and the Fleets it builds in a call; they are destroyed at its end.

    ``config``: the transport's options, where others than its defaults are tested.
    """

    bootstrap: BootstrapConfig
    transport: str
    fleets: list[Fleet] = field(default_factory=list)
    config: CommConfig | None = None

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    @property
    def world(self) -> int:
        return self.bootstrap.world_size

    @property
    def device(self) -> torch.device:
        return torch.device(self.bootstrap.device or "cpu")

    def fleet(
        self,
        params: FleetParams,
        knobs: list[FleetAlgoKnob] | None = None,
        *,
        meeting: Meeting | None = None,
        **bootstrap: Any,
    ) -> Fleet:
        """A Fleet of the transport under test; keyword arguments replace fields of the bootstrap."""
        boot = replace(self.bootstrap, **bootstrap)
        self.fleets.append(create_fleet(boot, params, knobs or (), self.config or self.transport, meeting=meeting))
        return self.fleets[-1]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """This tensor on the device under test, in memory of its own."""
        return tensor.to(self.device, copy=True)

    def mine(self, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's tokens, ids and weights of a problem."""
        return tuple(  # type: ignore[return-value]
            self.put(part[self.rank]) for part in (problem.xs, problem.topk_ids, problem.topk_weights)
        )

    def meet(self, name: str) -> None:
        """Wait until all ranks are here. Each name serves once."""
        store = self.bootstrap.tcp_store
        if store.add(f"meet/{name}", 1) == self.world:
            store.set(f"met/{name}", "")
        store.wait([f"met/{name}"], timedelta(seconds=WAIT_S))


def enter(bootstrap: BootstrapConfig, fn: Callable[..., Any], transport: str, device: str, args: tuple) -> Any:
    """Run ``fn(context, *args)`` on this rank and bring what it returns to the CPU."""
    place, config, wait_s = torch.device(device), None, WAIT_S
    if place.type == "cuda":
        os.environ["MOEFLEET_CHECK"] = "1"  # what a kernel meets is raised by the call that launched it
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # ranks may outnumber GPUs
        place = torch.device("cuda", bootstrap.rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        wait_s = GPU_WAIT_S
        if transport == "nvlink" and bootstrap.world_size > torch.cuda.device_count():
            config = NVLinkConfig(programs=8)  # kernels that wait take turns on a GPU: small ones do so quickly
    context = RankContext(replace(bootstrap, device=place, timeout_s=wait_s), transport, config=config)
    try:
        return to_cpu(fn(context, *args))
    finally:
        for fleet in context.fleets:
            fleet.destroy()


def to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_cpu, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_cpu, value))
    return {key: to_cpu(each) for key, each in value.items()} if isinstance(value, dict) else value


# One step, and its parts.


def routed(fleet: Fleet, ids: torch.Tensor, weights: torch.Tensor, *knobs: HandleAlgoKnob) -> Handle:
    return fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights), *knobs])


def sent(*x: torch.Tensor) -> DispatchInputParams:
    return DispatchInputParams(list(x))


def made(rows: torch.Tensor, **options: Any) -> CombineInputParams:
    return CombineInputParams([rows], **options)


def received(out: DispatchOutput) -> Received:
    """A copy that outlives the step."""
    scales = None if out.expert_scales is None else out.expert_scales.view(torch.uint8)
    parts = (
        out.expert_tensors,
        out.recv_topk_idx,
        out.recv_topk_weights,
        out.expert_counts,
        out.recv_total_counter,
        scales,
    )
    return Received(*(None if part is None else part.detach().cpu().clone() for part in parts))


def gain_of(expert: Any) -> Any:
    """What an expert (or a tensor of them) of this suite multiplies its input by: exact in every row type."""
    return (1 + expert % 8) / 4


def compute(fleet: Fleet, out: DispatchOutput, fill: float = NAN) -> torch.Tensor:
    """Rows of this suite's experts. Rows past a count hold NaN, there and in what was received."""
    experts = fleet.placement.experts_of(fleet.bootstrap.rank)
    rows = reference.compute(out, lambda x, index: x * gain_of(experts[index]), fill=fill)
    poison(out)
    return rows


def poison(out: DispatchOutput) -> None:
    """Write NaN into every received row past a count: whatever reads one shows it."""
    rows = out.expert_tensors
    if out.expert_counts is None:
        assert out.recv_total_counter is not None
        rows[int(out.recv_total_counter) :] = NAN
    else:
        for block, count in zip(rows, out.expert_counts.tolist(), strict=True):
            block[count:] = NAN


def step(fleet: Fleet, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Received, torch.Tensor]:
    """A whole step: what this rank received, and its result."""
    with routed(fleet, ids, weights) as handle:
        out = handle.dispatch(sent(x))
        got = received(out)
        return got, handle.combine(made(compute(fleet, out))).x
