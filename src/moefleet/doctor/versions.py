"""Which packages are here, and what each optional one is for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from .._version import __version__

REQUIRED = ("torch", "numpy", "typer", "rich")
OPTIONAL = {
    "triton": ("the nvlink transport", "gpu"),
    "transformers": ("moefleet.integrations.transformers, moefleet demo", "transformers"),
    "safetensors": ("moefleet demo", "transformers"),
    "matplotlib": ("--plot", "plot"),
    "prometheus-client": ("metrics for Prometheus", "prometheus"),
}
"""Distribution -> what it is for, and the extra of moefleet that brings it."""


@dataclass(frozen=True)
class Package:
    """A package.

    Attributes:
        version: ``None`` if it is not installed.
        needed_for: words, for an optional one.
        install: the command that brings it, where it is missing.
    """

    name: str
    version: str | None
    needed_for: str = ""
    install: str = ""


def packages() -> tuple[Package, ...]:
    """Python, moefleet and what they use. Imports none of it."""
    found = [Package("python", platform.python_version()), Package("moefleet", __version__)]
    found += [Package(name, _version(name)) for name in REQUIRED]
    found.append(Package("CUDA of torch", torch.version.cuda or "none"))
    for name, (purpose, extra) in OPTIONAL.items():
        version = _version(name)
        found.append(Package(name, version, purpose, "" if version else extra_line(extra)))
    return tuple(found)


def extra_line(extra: str) -> str:
    """How to install moefleet with one of its extras."""
    return f'pip install "moefleet[{extra}]"'


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
