"""All findings together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from .. import native
from ..fleet import Limits
from .backends import Backend, kernels, transports
from .fleets import FleetSize, fleet_sizes
from .machine import Machine, look
from .versions import Package, packages


@dataclass(frozen=True)
class Diagnosis:
    """What ``moefleet doctor`` says.

    Attributes:
        machine: hardware.
        helper: the compiled helper of CPU ranks, or why they do without.
        packages: versions.
        transports, kernels: backends, usable or not.
        fleets: what Fleets of common sizes would take, on any machine.
    """

    machine: Machine
    helper: native.Status
    packages: tuple[Package, ...]
    transports: tuple[Backend, ...]
    kernels: tuple[Backend, ...]
    fleets: tuple[FleetSize, ...]

    @property
    def healthy(self) -> bool:
        """Whether at least one transport works."""
        return any(each.available for each in self.transports)

    @property
    def auto(self) -> str | None:
        """The first transport that works here, in "auto"'s order; ``None`` without one."""
        return next((each.name for each in self.transports if each.available), None)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: sets are sorted lists, layouts go by value."""
        return {
            "healthy": self.healthy,
            "auto": self.auto,
            "machine": asdict(self.machine),
            "helper": {**asdict(self.helper), "path": str(self.helper.path or "")},
            "packages": [asdict(each) for each in self.packages],
            "transports": [_backend(each) for each in self.transports],
            "kernels": [_backend(each) for each in self.kernels],
            "fleets": [asdict(each) for each in self.fleets],
        }


def examine() -> Diagnosis:
    """Look at everything. Takes what importing every backend takes, and compiles the helper if that was never done."""
    return Diagnosis(look(), native.status(), packages(), transports(), kernels(), fleet_sizes())


def limits_in_words(limits: Limits) -> dict[str, Any]:
    """A transport's limits as JSON values: sets as sorted lists, ``None`` for no bound."""
    return {each.name: _plain(getattr(limits, each.name)) for each in fields(limits)}


def _plain(value: Any) -> Any:
    return sorted(getattr(one, "value", one) for one in value) if isinstance(value, frozenset) else value


def _backend(each: Backend) -> dict[str, Any]:
    found = {one.name: getattr(each, one.name) for one in fields(each)}
    return {
        **found,
        "features": list(each.features),
        "limits": None if each.limits is None else limits_in_words(each.limits),
    }
