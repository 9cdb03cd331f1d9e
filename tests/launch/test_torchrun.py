"""Processes that torchrun started run the same calls as ranks that are started here, and one of them tells."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpConfigError, MoEEpTimeoutError
from moefleet.launch import RankPool
from moefleet.launch.torchrun import TorchrunPool, ranks, reports

LAYER = ("bench", "layer", "--experts", "6", "--topk", "2", "--hidden", "32", "--intermediate", "16", "--validate")
ONCE = ("--layout", "flat", "--transport", "shm", "--tokens", "3", "--steps", "1", "--rounds", "1", "--threads", "1")


def product(bootstrap: BootstrapConfig, factor: int) -> int:
    return bootstrap.rank * factor


def no_one(bootstrap: BootstrapConfig) -> None:
    if bootstrap.rank == 1:
        raise MoEEpConfigError("not me")


def as_torchrun_starts_it(bootstrap: BootstrapConfig, port: int, file: str) -> dict[str, Any]:
    from moefleet.cli import app

    environment = {"RANK": bootstrap.rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        with ranks(2, threads_per_rank=1) as both, ranks(1, threads_per_rank=1) as first:
            assert isinstance(both, TorchrunPool)
            values = [result.value for result in both.run(product, 10)]
            failed = [str(result.error) for result in both.run(no_one)]
            alone = [result.value for result in first.run(product, 10)]
        ran = CliRunner().invoke(app, [*LAYER, *ONCE, "--json", file])
        return {
            "values": values,
            "failed": failed,
            "alone": alone,
            "reports": reports(),
            "code": ran.exit_code,
            "shown": ran.output,
        }
    finally:
        for name in environment:
            del os.environ[name]


def test_all_ranks_learn_what_all_returned_and_the_first_one_tells(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "layer.json"
    with RankPool(2, threads_per_rank=1) as pool:
        results = pool.run(as_torchrun_starts_it, port, str(file), timeout_s=100)
    assert [result.error for result in results] == [None, None]
    told = [result.value for result in results]
    for each in told:
        assert (each["values"], each["alone"], each["failed"]) == ([0, 10], [0], ["None", "not me"])
        assert each["code"] == 0, each["shown"]
    assert [each["reports"] for each in told] == [True, False]
    assert "flat, 2 ranks" in told[0]["shown"] and told[1]["shown"] == ""
    assert {record["valid"] for record in json.loads(file.read_text())} == {True}


@pytest.fixture
def one_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_more_ranks_than_torchrun_started_are_refused(one_of_one: None) -> None:
    with pytest.raises(MoEEpConfigError, match="world: got 2, allowed at most 1, as torchrun started them"):
        ranks(2)


def test_a_rank_that_does_not_return_is_named(one_of_one: None) -> None:
    pool = TorchrunPool(1, threads_per_rank=1)
    pool._world = 2
    missing = pool.run(product, 3, timeout_s=0.05)[1].error
    assert isinstance(missing, MoEEpTimeoutError) and missing.ranks == (1,)


def test_elsewhere_ranks_are_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with ranks(1) as pool:
        assert isinstance(pool, RankPool) and reports()
