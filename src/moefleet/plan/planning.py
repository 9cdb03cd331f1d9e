"""A whole plan, as a function of the model, the number of ranks and the surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import EpLayout, FleetParams
from ..errors import config_error
from ..knobs import FleetAlgoKnob
from ..placement import Placement
from .advice import Advice, advise, fleet_params
from .checkpoint import Checkpoint
from .fit import Fit, device_type, fit
from .memory import FORMULAS, fleet_memory
from .shape import ModelShape
from .surroundings import Surroundings
from .traffic import Traffic, traffic
from .words import in_bytes, in_ranks


@dataclass(frozen=True)
class RankShare:
    """What one rank holds.

    Attributes:
        rank: which.
        first, count: its experts, in every MoE layer: ``count`` of them from ``first`` on.
        expert_bytes: their weights over all layers.
        dense_bytes: all other weights, the same on every rank; ``None`` if unknown.
    """

    rank: int
    first: int
    count: int
    expert_bytes: int
    dense_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """What is known of both."""
        return self.expert_bytes + (self.dense_bytes or 0)


@dataclass(frozen=True)
class LayoutPlan:
    """One layout: the Fleet, what crosses in a step of one layer, and which transports fit.

    Attributes:
        params: of the Fleet.
        traffic: of one step.
        fits: by transport, in "auto"'s order.
    """

    params: FleetParams
    traffic: Traffic
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that ``moefleet plan`` says.

    Attributes:
        shape, world_size: what it is for.
        weights_from: ``"checkpoint"`` (as stored) or ``"config"`` (computed).
        ranks: what each holds.
        advice, layouts: one entry for each layout asked for: the size to build its Fleet with, and the rest.
        warnings: what will not work or will surprise; ``notes``: what the numbers do and do not include.
    """

    shape: ModelShape
    world_size: int
    weights_from: str
    ranks: tuple[RankShare, ...]
    advice: tuple[Advice, ...]
    layouts: tuple[LayoutPlan, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: enums by value, a layer's bytes beside those of all layers."""
        return {
            "model": asdict(self.shape),
            "world_size": self.world_size,
            "weights_from": self.weights_from,
            "ranks": [asdict(rank) for rank in self.ranks],
            "advice": [{**asdict(each), "layout": each.layout.value} for each in self.advice],
            "layouts": [self._layout_json(each) for each in self.layouts],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def _layout_json(self, each: LayoutPlan) -> dict[str, Any]:
        params, layers = each.params, self.shape.moe_layers
        return {
            "layout": params.resolved_layout.value,
            "fleet_params": {
                **asdict(params),
                "algorithm": params.algorithm.value,
                "layout": params.resolved_layout.value,
            },
            "traffic": asdict(each.traffic),
            "bytes_of_all_layers": layers * (each.traffic.dispatch_bytes + each.traffic.combine_bytes),
            "transports": [asdict(found) for found in each.fits],
        }


def make_plan(
    shape: ModelShape,
    world_size: int,
    around: Surroundings,
    *,
    tokens: int | None = None,
    layouts: Sequence[EpLayout] = tuple(EpLayout),
    checkpoint: Checkpoint | None = None,
    algo_knobs: Sequence[FleetAlgoKnob] = (),
) -> Plan:
    """Compute a plan.

    Args:
        shape: the model.
        world_size: ``W``.
        around: transports to judge, and memory to hold them against.
        tokens: ``M``; ``None`` takes what is advised for each layout.
        layouts: those to look at.
        checkpoint: stored sizes; without it weights are computed from ``shape``.
        algo_knobs: of the Fleet; what counts is whether it quantises rows.

    Raises:
        MoEEpConfigError: a size is out of range.
    """
    for name, value in (("world_size", world_size), ("tokens", 1 if tokens is None else tokens)):
        if value < 1:
            raise config_error(f"plan {name}", value, "at least 1")
    ranks = shares(shape, world_size, checkpoint)
    weights = ranks[0].total_bytes if checkpoint is None else max(rank.total_bytes for rank in ranks)
    advice, plans = [], []
    for layout in dict.fromkeys(layouts):
        proposal = _advise(shape, world_size, layout, weights, around, algo_knobs)
        advice.append(proposal)
        params = fleet_params(shape, proposal.tokens if tokens is None else tokens, layout)
        found = [
            fit(name, each, params, world_size, weights, around, algo_knobs) for name, each in around.transports.items()
        ]
        plans.append(LayoutPlan(params, traffic(params, world_size, shape.topk, algo_knobs), tuple(found)))
    plan = Plan(
        shape=shape,
        world_size=world_size,
        weights_from="config" if checkpoint is None else "checkpoint",
        ranks=ranks,
        advice=tuple(advice),
        layouts=tuple(plans),
        warnings=(),
        notes=_notes(shape, checkpoint, algo_knobs),
    )
    return replace(plan, warnings=_warnings(plan, weights, around))


def shares(shape: ModelShape, world_size: int, checkpoint: Checkpoint | None) -> tuple[RankShare, ...]:
    """What each rank holds when experts sit in contiguous blocks."""
    placement = Placement.contiguous(shape.experts, world_size)
    if checkpoint is None:
        each = [shape.moe_layers * shape.expert_parameters * shape.dtype_bytes] * shape.experts
        dense = None if shape.dense_parameters is None else shape.dense_parameters * shape.dtype_bytes
    else:
        each, dense = list(checkpoint.expert_bytes), checkpoint.dense_bytes
    found, first = [], 0
    for rank, count in enumerate(placement.slots_per_rank):
        found.append(RankShare(rank, first, count, sum(each[first : first + count]), dense))
        first += count
    return tuple(found)


def _advise(
    shape: ModelShape,
    world_size: int,
    layout: EpLayout,
    weights: int,
    around: Surroundings,
    algo_knobs: Sequence[FleetAlgoKnob],
) -> Advice:
    """By the transport that takes most: of those that work here, or of all where the memory is another machine's."""
    known = {name: device_type(found, around) for name, found in around.transports.items() if name in FORMULAS}
    working = {name: device for name, device in known.items() if around.transports[name].available}
    devices = known if around.rank_bytes is not None or not working else working
    rooms = [around.for_each(device, world_size) for device in devices.values()]
    room = min((each for each in rooms if each is not None), default=None)

    def takes(params: FleetParams) -> tuple[int, str]:
        sizes = {name: fleet_memory(name, params, world_size, device, algo_knobs) for name, device in devices.items()}
        return max(((size.at_start, name) for name, size in sizes.items() if size), default=(0, "no transport says"))

    return advise(shape, world_size, layout, takes, None if room is None else room - weights)


def _warnings(plan: Plan, weights: int, around: Surroundings) -> tuple[str, ...]:
    found = []
    if empty := [rank.rank for rank in plan.ranks if not rank.count]:
        found.append(
            f"{in_ranks(empty[0], empty[-1])} of {plan.world_size} get no expert: there are {plan.shape.experts}. "
            "That works, and wastes them as expert ranks."
        )
    elif plan.shape.experts % plan.world_size:
        most, least = plan.ranks[0].count, plan.ranks[-1].count
        found.append(
            f"{plan.shape.experts} experts do not divide by {plan.world_size} ranks: some hold {most}, some {least}. "
            "Libraries such as NCCL-EP may refuse this."
        )
    memories = {f.device_type: around.for_each(f.device_type, plan.world_size) for p in plan.layouts for f in p.fits}
    for device, room in memories.items():
        if room is not None and weights > room:
            whose, todo = _whose(device, plan.world_size, around)
            found.append(
                f"weights alone take {in_bytes(weights)} on a rank, {in_bytes(room)} {whose} available: {todo}."
            )
    for each in plan.layouts:
        layout = each.params.resolved_layout.value
        for one in each.fits:
            room = memories[one.device_type]
            if one.memory is None or room is None or weights > room:
                continue
            what, less = f"{one.transport}, {layout}: a Fleet", f"lower M = {each.params.max_tokens_per_rank}"
            if one.short_bytes:
                found.append(
                    f"{what} takes {in_bytes(one.memory.at_start)} beside {in_bytes(weights)} of weights, "
                    f"{in_bytes(room)} available on each rank: {less}, or use more ranks."
                )
            elif weights + one.memory.at_most > room:
                found.append(
                    f"{what} may grow to {in_bytes(one.memory.at_most)} if all tokens go to one rank, which is more "
                    f"than the {in_bytes(room - weights)} that weights leave: {less}."
                )
    return tuple(dict.fromkeys(found))  # --memory says the same of CPU and GPU


def _whose(device: str, world_size: int, around: Surroundings) -> tuple[str, str]:
    """Where the memory is, and what would help."""
    if around.rank_bytes is not None:
        return "are", "use more ranks"
    if device == "cuda":
        return "of a GPU here are", "use more ranks, or say with --memory what theirs have"
    return (
        f"(this host's, shared by {world_size} ranks) are",
        "use more or larger hosts, and say with --memory what a rank gets there",
    )


def _notes(shape: ModelShape, checkpoint: Checkpoint | None, algo_knobs: Sequence[FleetAlgoKnob]) -> tuple[str, ...]:
    notes = [
        "The cache for attention and activations are not included.",
        "shm fits only where all ranks are on one host, nvlink where their GPUs are in one NVLink domain.",
    ]
    if algo_knobs:
        notes.append(f"Fleets are built with {', '.join(map(repr, algo_knobs))}.")
    if checkpoint is not None:
        notes.append("Weights are as stored in the checkpoint; loaded as another type they take another size.")
        if checkpoint.unused_bytes:
            notes.append(
                f"{in_bytes(checkpoint.unused_bytes)} of the checkpoint belong to layers beyond the config's "
                f"{shape.layers} and are not counted."
            )
        return tuple(notes)
    if shape.quantized:
        notes.append(f"Weights are stored as {shape.quantized}; they are computed here as {shape.dtype}.")
    if shape.dense_parameters is None:
        notes.append("Weights that are no routed experts are unknown and not counted.")
    return tuple(notes)
