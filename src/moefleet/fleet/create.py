"""create_fleet: all ranks meet, agree on parameters and transport, and build."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..config import BootstrapConfig, CommConfig, FleetParams, resolve_device
from ..errors import MoEEpConfigError, MoEEpNotBuiltError, config_error
from ..knobs import FleetAlgoKnob, FleetAlgoKnobFaultTolerance
from ..placement import Placement
from .base import Fleet, FleetSpec
from .limits import check_limits
from .registry import available_backends, config_name, fleet_class, probe
from .rendezvous import Meeting

log = logging.getLogger("moefleet")


@dataclass(frozen=True)
class Choice:
    """The transport that all ranks take, and why each one before it was passed over."""

    name: str
    passed_over: dict[str, str]


def create_fleet(
    bootstrap: BootstrapConfig,
    params: FleetParams,
    algo_knobs: Sequence[FleetAlgoKnob] = (),
    backend: str | CommConfig = "auto",
    *,
    meeting: Meeting | None = None,
) -> Fleet:
    """Build a Fleet together with all other ranks of ``bootstrap``. Blocks until all have come, or its timeout.

    Args:
        bootstrap: this rank and its group.
        params: sizes; equal on all ranks.
        algo_knobs: options; equal on all ranks. One that the transport cannot honour is an error.
        backend: ``"auto"``, a transport's name, or its config.
        meeting: where this rank has come to already, see :class:`Meeting`.

    Where a rank fails, or its process ends, all others raise at once; a process that is killed on another host is
    waited for until the timeout.

    Raises:
        MoEEpConfigError: a bad value, or ranks that disagree (raised on all ranks, with both values).
        MoEEpUnknownBackendError: no such transport.
        MoEEpNotBuiltError: the transport is not usable here; the message says why.
        MoEEpPeerError: another rank could not build its part, with its reason, or has ended.
        MoEEpTimeoutError: a rank did not come within ``bootstrap.timeout_s``.
    """
    meeting = Meeting(bootstrap) if meeting is None else meeting.renewed(bootstrap)
    with meeting.announcing():
        name, config = config_name(backend)
        spec, choice = agree(FleetSpec(bootstrap, params, tuple(algo_knobs), config, meeting, name))
        with torch.inference_mode(False):  # its memory outlasts the caller's mode
            fleet = fleet_class(choice.name)(spec)
        try:
            meeting.close()  # whoever comes from now on is none of this Fleet's first ranks
        except BaseException:
            fleet.destroy()
            raise
    fleet.passed_over = choice.passed_over
    log.info("fleet %d: %s", meeting.fleet_id, fleet.describe())
    return fleet


def agree(wanted: FleetSpec) -> tuple[FleetSpec, Choice]:
    """Hold all ranks' wishes against each other at their meeting: the spec that all share, and the transport.

    Raises:
        MoEEpConfigError: ranks disagree; on all of them, with both values.
        MoEEpNotBuiltError: no transport fits, with each one's reason.
    """
    hellos = wanted.meeting.exchange("hello", lambda: _hello(wanted))
    members = [hello["backend"] for hello in hellos if hello["placement"] is not None]
    if members:  # newcomers to a running Fleet that leave the choice to it
        hellos = [{**hello, "backend": members[0]} if hello["backend"] == "auto" else hello for hello in hellos]
    _check_agreement(hellos)
    # Only ranks that are members already know a placement; newcomers take it from them.
    placements = [hello["placement"] for hello in hellos if hello["placement"] is not None]
    for other in placements[1:]:
        if other != placements[0]:
            raise config_error("placement", f"{placements[0]} and {other}", "the same on all ranks")
    placement = None
    if placements:
        slots, physical = placements[0]
        placement = Placement(wanted.params.num_experts, tuple(slots), None if physical is None else tuple(physical))
    return replace(wanted, placement=placement), _choose(hellos[0]["backend"], hellos)


def _hello(wanted: FleetSpec) -> dict[str, Any]:
    bootstrap, params, knobs, name = wanted.bootstrap, wanted.params, wanted.knobs, wanted.backend
    _check_supervision(knobs)
    candidates = available_backends() if name == "auto" else (name,)
    offers = {}
    for candidate in candidates:
        capability = probe(candidate)
        reason = capability.reason
        if capability.available:
            try:
                _check_knobs(fleet_class(candidate), knobs)
                if capability.limits is not None:
                    device = resolve_device(bootstrap)
                    check_limits(candidate, capability.limits, params, bootstrap.world_size, device, knobs)
            except MoEEpConfigError as error:
                if name != "auto":
                    raise
                reason = str(error)
        offers[candidate] = {"reason": reason, "domain": capability.domain}
    sizes = {k: str(v) for k, v in asdict(params).items()}
    equal = sizes | {"world_size": str(bootstrap.world_size), "config": str(wanted.config)}
    equal["algo_knobs"] = str(sorted(map(repr, knobs)))
    place = None if wanted.placement is None else [wanted.placement.slots_per_rank, wanted.placement.physical]
    return {"agree": equal, "backend": name, "offers": offers, "placement": place}


def _check_knobs(cls: type[Fleet], knobs: Sequence[FleetAlgoKnob]) -> None:
    for knob in knobs:
        if not isinstance(knob, FleetAlgoKnob):
            raise config_error("algo_knobs", f"a {type(knob).__name__}", "FleetAlgoKnob values")
        if type(knob) not in cls.knobs and getattr(knob, "enabled", True):
            raise config_error(
                "algo_knobs",
                type(knob).__name__,
                f"what {cls.name} honours: {', '.join(sorted(k.__name__ for k in cls.knobs)) or 'none'}",
                cls.why_not.get(type(knob), "leave it out, or choose another backend"),
            )


def _check_supervision(knobs: Sequence[FleetAlgoKnob]) -> None:
    """Refuse fault tolerance under torchrun, unless the caller knows better."""
    for knob in knobs:
        tolerant = isinstance(knob, FleetAlgoKnobFaultTolerance) and knob.enabled and not knob.supervised
        if tolerant and "TORCHELASTIC_RUN_ID" in os.environ:
            raise config_error(
                "FleetAlgoKnobFaultTolerance.supervised",
                "False under torchrun, which ends all workers when one of them ends",
                "True where something keeps the others, and their store, running",
                "start ranks with moefleet.launch or a supervisor of your own, or leave the knob out",
            )


def _check_agreement(hellos: list[dict[str, Any]]) -> None:
    first = {"backend": hellos[0]["backend"], **hellos[0]["agree"]}
    for rank, hello in enumerate(hellos):
        for field_name, value in {"backend": hello["backend"], **hello["agree"]}.items():
            if value != first[field_name]:
                raise config_error(
                    f"create_fleet {field_name}",
                    f"{first[field_name]} on rank 0 and {value} on rank {rank}",
                    "the same value on all ranks",
                    "build the Fleet with equal arguments everywhere",
                )


def _choose(name: str, hellos: list[dict[str, Any]]) -> Choice:
    passed_over: dict[str, str] = {}
    for candidate in hellos[0]["offers"] if name == "auto" else [name]:
        reason = _why_not(candidate, hellos)
        if not reason:
            return Choice(candidate, passed_over)
        passed_over[candidate] = reason
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in passed_over.items())
    what = "no transport fits this group" if name == "auto" else f"backend {name!r} is not usable"
    raise MoEEpNotBuiltError(f"{what}: {reasons}")


def _why_not(candidate: str, hellos: list[dict[str, Any]]) -> str:
    domains: set[str] = set()
    for rank, hello in enumerate(hellos):
        offer = hello["offers"].get(candidate)
        if offer is None:
            return f"not installed on rank {rank}"
        if offer["reason"]:
            return f"rank {rank}: {offer['reason']}"
        domains.add(offer["domain"])
        if len(domains) > 1:
            return f"rank {rank} is in another domain than rank 0 (host, network namespace, user or fabric)"
    return ""
