"""Expert kernels by name: the built-in ones, those registered at run time, and other people's packages.

A package offers a kernel through an entry point, without touching this one::

    [project.entry-points."moefleet.kernels"]
    my_kernel = "my_package:MyKernel"      # an ExpertKernel subclass, or a callable config -> ExpertKernel
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import TypeVar

from ..config import GroupedGemmConfig, IdentityConfig, KernelConfig
from ..errors import MoEEpNotBuiltError, MoEEpUnknownBackendError, config_error
from .base import ExpertKernel

__all__ = ["ENTRY_POINT_GROUP", "ExpertKernel", "available_kernels", "get_kernel", "register_kernel"]

KernelFactory = Callable[[KernelConfig], ExpertKernel]
F = TypeVar("F", bound=KernelFactory)

ENTRY_POINT_GROUP = "moefleet.kernels"
_BUILT_IN: dict[str, tuple[str, str, type[KernelConfig]]] = {
    IdentityConfig.name: (".identity", "IdentityKernel", IdentityConfig),
    GroupedGemmConfig.name: (".grouped_gemm", "GroupedGemmKernel", GroupedGemmConfig),
}
_registered: dict[str, KernelFactory] = {}


def register_kernel(name: str) -> Callable[[F], F]:
    """Decorator: make an :class:`ExpertKernel` subclass, or a callable config -> ExpertKernel, known by this name.

    It comes before a built-in kernel or an entry point of the same name.
    """

    def register(factory: F) -> F:
        _registered[name] = factory
        return factory

    return register


def available_kernels() -> list[str]:
    """Every name that :func:`get_kernel` knows, sorted. Imports none of them."""
    return sorted({*_BUILT_IN, *_registered, *(point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP))})


def get_kernel(config: KernelConfig | str) -> ExpertKernel:
    """The kernel of this config, or of this name with its default options (a bare ``KernelConfig`` if not built in).

    Raises:
        MoEEpUnknownBackendError: no kernel has this name; the message lists those that exist.
        MoEEpNotBuiltError: the package that offers the kernel cannot be imported.
        MoEEpConfigError: the kernel refuses an option.
    """
    name = config if isinstance(config, str) else config.name
    factory = _find(name)
    if isinstance(config, str):
        config = _BUILT_IN[name][2]() if name in _BUILT_IN else KernelConfig()
    return factory(config)


def _find(name: str) -> KernelFactory:
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        module, attribute, _ = _BUILT_IN[name]
        built_in: KernelFactory = getattr(import_module(module, __name__), attribute)
        return built_in
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            offered: KernelFactory = point.load()
        except ImportError as error:
            raise MoEEpNotBuiltError(f"kernel {name!r} ({point.value}) cannot be imported: {error}") from error
        return offered
    raise config_error("kernel", repr(name), ", ".join(available_kernels()), cls=MoEEpUnknownBackendError)
