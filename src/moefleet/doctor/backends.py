"""Every transport and kernel: whether it works here, why not, and what to install."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from ..fleet import Capability, Limits, available_backends, probe
from ..fleet.registry import BUILT_IN
from ..fleet.registry import ENTRY_POINT_GROUP as TRANSPORTS
from ..kernels import ENTRY_POINT_GROUP as KERNELS
from ..kernels import available_kernels, get_kernel
from .versions import extra_line

NVIDIA_DRIVER = "/dev/nvidiactl"


@dataclass(frozen=True)
class Backend:
    """A transport or a kernel.

    Attributes:
        name: its registry name.
        available: whether it works in this process.
        reason: why not; empty if it does.
        install: the command that would help, where there is one.
        offered_by: the installed package and version that brings it, where that is not moefleet.
        features, limits: of a transport.
    """

    name: str
    available: bool
    reason: str = ""
    install: str = ""
    offered_by: str = ""
    features: tuple[str, ...] = ()
    limits: Limits | None = None


def transports() -> tuple[Backend, ...]:
    """All transports in "auto"'s order. One that cannot be imported or probed is not available, and that is why."""
    return tuple(_transport(name) for name in available_backends())


def kernels() -> tuple[Backend, ...]:
    """All kernels by name. Each is imported and made with its default options."""
    return tuple(_kernel(name) for name in available_kernels())


def _transport(name: str) -> Backend:
    point = None if name in BUILT_IN else _entry_point(TRANSPORTS, name)
    try:
        found = probe(name)
        features = tuple(sorted(found.features))
    except Exception as error:  # other people's code, whose answer may be no Capability
        found, features = Capability(False, f"its probe failed: {error!r}"), ()
    install = "" if found.available else _install(name, point)
    return Backend(name, found.available, found.reason, install, _package(point), features, found.limits)


def _kernel(name: str) -> Backend:
    point = _entry_point(KERNELS, name)
    try:
        get_kernel(name)
    except Exception as error:  # other people's code
        return Backend(name, False, str(error) or repr(error), _install(name, point), _package(point))
    return Backend(name, True, offered_by=_package(point))


def _entry_point(group: str, name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=group, name=name)), None)


def _package(point: EntryPoint | None) -> str:
    dist: Any = None if point is None else point.dist
    return "" if dist is None else f"{dist.name} {dist.version}"


def _install(name: str, point: EntryPoint | None) -> str:
    """The pip line that would help, or an empty string where none would."""
    if point is not None:
        return "" if point.dist is None else f"pip install --upgrade --force-reinstall {point.dist.name}"
    if name == "nvlink":
        if torch.version.cuda is None:
            return "pip install --force-reinstall torch" if os.path.exists(NVIDIA_DRIVER) else ""
        if importlib.util.find_spec("triton") is None:
            return extra_line("gpu")
    return ""
