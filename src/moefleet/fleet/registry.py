"""Names to transports: registration, the capability probe, and the choice that "auto" makes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TypeVar

from ..config import BootstrapConfig, CommConfig, FleetParams, resolve_device
from ..errors import MoEEpConfigError, MoEEpNotBuiltError, MoEEpUnknownBackendError, config_error
from .base import Fleet
from .limits import Limits, check_limits

ENTRY_POINT_GROUP = "moefleet.transports"

BUILT_IN = {name: f"moefleet.transports.{name}" for name in ("nvlink", "shm", "torch_dist")}
"""Our own transports, imported when they are first asked for; each module registers its Fleet."""

PREFERENCE = ("nvlink", "nccl_ep", "nixl_ep", "shm", "torch_dist")
"""The order in which "auto" tries; other people's transports come after, by name."""

_fleets: dict[str, type[Fleet]] = {}
_FleetType = TypeVar("_FleetType", bound=type[Fleet])


@dataclass(frozen=True)
class Capability:
    """What a probe found.

    Attributes:
        available: whether this process can use the transport (for the given group and parameters, if given).
        reason: why not, and what would help; empty if available.
        features: words such as ``"fault_tolerance"``, ``"graphs"``.
        limits: its bounds as data.
        domain: ranks can form a Fleet only where this is the same on all of them (for example one host).
    """

    available: bool
    reason: str = ""
    features: frozenset[str] = field(default=frozenset())
    limits: Limits | None = None
    domain: str = ""


def register_fleet(name: str) -> Callable[[_FleetType], _FleetType]:
    """Class decorator: make a Fleet known by this name.

    The class is called with one :class:`moefleet.fleet.FleetSpec` and has a classmethod ``probe() -> Capability``.
    """

    def register(cls: _FleetType) -> _FleetType:
        cls.name = name
        _fleets[name] = cls
        return cls

    return register


def available_backends() -> tuple[str, ...]:
    """Names of all transports that are registered here, usable or not, in "auto"'s order."""
    names = set(BUILT_IN) | set(_fleets) | {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    known = [name for name in PREFERENCE if name in names]
    return (*known, *sorted(names - set(known)))


def fleet_class(name: str) -> type[Fleet]:
    """The Fleet registered under ``name``, imported if need be.

    Raises:
        MoEEpUnknownBackendError: nothing of that name; the message lists what there is.
        MoEEpNotBuiltError: the package that offers it cannot be imported.
    """
    if name not in _fleets:
        try:
            if name in BUILT_IN:
                importlib.import_module(BUILT_IN[name])
            else:
                for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
                    register_fleet(name)(point.load())
        except (ImportError, AttributeError) as error:
            raise MoEEpNotBuiltError(f"transport {name!r} cannot be imported: {error}") from error
    if name not in _fleets:
        raise config_error(
            "backend",
            repr(name),
            "auto, " + ", ".join(available_backends()),
            "install the package that provides it, or choose one of these",
            cls=MoEEpUnknownBackendError,
        )
    return _fleets[name]


def probe(name: str, bootstrap: BootstrapConfig | None = None, params: FleetParams | None = None) -> Capability:
    """What transport ``name`` can do in this process, and why not if it cannot. Nothing is allocated.

    With ``params`` (and ``bootstrap``) the transport's limits are held against them as well. A transport that cannot be
    imported, or whose own probe fails, is not available, and that is the reason.

    Raises:
        MoEEpUnknownBackendError: no transport of that name.
    """
    try:
        capability = fleet_class(name).probe()
    except MoEEpUnknownBackendError:
        raise
    except Exception as error:
        told = str(error) if isinstance(error, MoEEpNotBuiltError) else f"its probe failed: {error!r}"
        return Capability(False, told)
    if not capability.available or params is None or capability.limits is None:
        return capability
    boot = bootstrap or BootstrapConfig(1, 0)
    try:
        check_limits(name, capability.limits, params, boot.world_size, resolve_device(boot))
    except MoEEpConfigError as error:
        return Capability(False, str(error), capability.features, capability.limits, capability.domain)
    return capability


def supports_fault_tolerance(name: str) -> bool:
    """Whether transport ``name`` has fault tolerance in this process. Never raises."""
    try:
        capability = probe(name)
    except Exception:
        return False
    return capability.available and "fault_tolerance" in capability.features


def config_name(backend: str | CommConfig) -> tuple[str, CommConfig | None]:
    """A backend argument as (name, config)."""
    if isinstance(backend, CommConfig):
        return backend.name, backend
    if isinstance(backend, str):
        return backend, None
    raise config_error("backend", f"a {type(backend).__name__}", '"auto", a name, or a transport\'s config')
