"""Kernels by name: built in, registered, from another package's entry point."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

import pytest
import torch

from moefleet import kernels
from moefleet.config import EpLayout, GroupedGemmConfig, IdentityConfig, KernelConfig
from moefleet.errors import MoEEpConfigError, MoEEpNotBuiltError, MoEEpUnknownBackendError
from moefleet.kernels import ExpertKernel, available_kernels, get_kernel, register_kernel
from moefleet.tensors import DispatchOutput


@dataclass(frozen=True)
class DoublingConfig(KernelConfig):
    name: ClassVar[str] = "doubling"
    times: float = 2.0


class Doubling(ExpertKernel):
    """An out-of-tree kernel with an option."""

    requires_weights = False

    def compute(self, out, layout, weights, *, into=None):
        times = self.config.times if isinstance(self.config, DoublingConfig) else 2.0
        return torch.mul(out.expert_tensors, times, out=into)


def doubling_by_threes(config: KernelConfig) -> ExpertKernel:
    return Doubling(DoublingConfig(times=3.0))


@pytest.fixture
def offer(monkeypatch):
    """Pretend that an installed package offers entry points, given as name=object reference."""

    def install(**references: str) -> None:
        points = [metadata.EntryPoint(name, value, kernels.ENTRY_POINT_GROUP) for name, value in references.items()]
        offered = metadata.EntryPoints(points)
        monkeypatch.setattr(metadata, "entry_points", lambda **which: offered.select(**which))

    return install


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(kernels, "_registered", {})


def doubled(kernel: ExpertKernel) -> float:
    out = DispatchOutput(torch.ones(1, 2, 3), expert_counts=torch.tensor([2], dtype=torch.int32))
    return float(kernel.compute(out, EpLayout.EXPERT_MAJOR, None)[0, 0, 0])


@pytest.mark.parametrize("config", [IdentityConfig(), GroupedGemmConfig(activation="relu")])
def test_built_in_by_config_and_by_name(config: KernelConfig) -> None:
    by_config, by_name = get_kernel(config), get_kernel(config.name)
    assert type(by_config) is type(by_name)
    assert by_config.config is config
    assert by_name.config == type(config)()


def test_importing_the_registry_imports_no_kernel() -> None:
    code = (
        "import sys, moefleet.kernels as k; names = k.available_kernels();"
        "print(names, [m for m in sys.modules if m.startswith('moefleet.kernels.') and m != 'moefleet.kernels.base'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_env(), timeout=100)
    assert done.stdout.strip() == "['grouped_gemm', 'identity'] []", done.stdout + done.stderr


def test_registered_class_and_function() -> None:
    assert register_kernel("doubling")(Doubling) is Doubling
    assert doubled(get_kernel("doubling")) == 2
    assert doubled(get_kernel(DoublingConfig(times=5))) == 5
    register_kernel("doubling")(doubling_by_threes)
    assert doubled(get_kernel("doubling")) == 3
    assert "doubling" in available_kernels()


def test_entry_point_loads_a_class_or_a_function(offer) -> None:
    offer(doubling=f"{__name__}:Doubling", tripling=f"{__name__}:doubling_by_threes")
    assert available_kernels() == ["doubling", "grouped_gemm", "identity", "tripling"]
    assert doubled(get_kernel("doubling")) == 2
    assert doubled(get_kernel(DoublingConfig(times=7))) == 7
    assert doubled(get_kernel("tripling")) == 3


def test_entry_point_that_cannot_be_imported(offer) -> None:
    offer(broken="no_such_package_at_all:Kernel")
    assert "broken" in available_kernels()
    with pytest.raises(MoEEpNotBuiltError, match=r"'broken' \(no_such_package_at_all:Kernel\).*No module named"):
        get_kernel("broken")


@pytest.mark.parametrize("unknown", ["grouped_gem", "", KernelConfig()])
def test_unknown_name_lists_those_that_exist(offer, unknown: str | KernelConfig) -> None:
    offer(doubling=f"{__name__}:Doubling")
    with pytest.raises(MoEEpUnknownBackendError, match="allowed doubling, grouped_gemm, identity") as caught:
        get_kernel(unknown)
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, MoEEpConfigError)


def _env() -> dict[str, str]:
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(kernels.__file__).parents[2])}
