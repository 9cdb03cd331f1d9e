"""A rank takes the CPU, or the GPU of its number on its machine, where there is one for each rank."""

from __future__ import annotations

import os

import pytest
import torch

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpArchError, MoEEpConfigError
from moefleet.launch import RankPool
from moefleet.launch.devices import require_device, take_device


def test_without_gpus_only_the_cpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_device("cpu", 99)
    assert take_device(BootstrapConfig(2, 1), "cpu") == BootstrapConfig(2, 1, device="cpu")
    with pytest.raises(MoEEpArchError, match="--device cuda: this machine has no CUDA GPU"):
        require_device("cuda", 1)


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    mine = take_device(BootstrapConfig(2, 1, timeout_s=7.0), "cuda")
    assert (taken, mine.device, mine.timeout_s) == ([1], torch.device("cuda", 1), 7.0)
    with pytest.raises(MoEEpConfigError, match="world: got 3, allowed at most 2, a GPU for each rank"):
        take_device(BootstrapConfig(3, 1), "cuda")
    assert taken == [1]


def test_under_torchrun_a_rank_takes_the_gpu_of_its_local_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert take_device(BootstrapConfig(4, 3), "cuda").device == torch.device("cuda", 1)
    assert take_device(BootstrapConfig(2, 0), "cuda").device == torch.device("cuda", 0), "one that this rank started"
    assert taken == [1, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(MoEEpConfigError, match="world: got 3, allowed at most 2, a GPU for each rank"):
        require_device("cuda", 4)


def computes(bootstrap: BootstrapConfig) -> tuple[int, float]:
    """Its parent's pid, and a number that a GPU made."""
    device = torch.device("cuda", bootstrap.rank % torch.cuda.device_count())
    return os.getppid(), float(torch.arange(5, device=device).sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preload", [(), ("tests.launch.opens_a_gpu",)], ids=["fork", "a GPU is open"])
def test_ranks_use_gpus_whether_they_are_forked_or_not(preload: tuple[str, ...]) -> None:
    with RankPool(2, preload=preload) as ranks:
        parents, numbers = zip(*(result.value for result in ranks.run(computes)), strict=True)
    assert numbers == (10.0, 10.0)
    assert len(set(parents)) == 1 and (parents[0] == os.getpid()) == bool(preload)
