"""Processes that torchrun started run the same calls as ranks that are started here, and one of them tells."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore
from typer.testing import CliRunner

from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpPeerError, MoEEpStoreError, MoEEpTimeoutError
from moefleet.launch import RankPool, torchrun
from moefleet.launch.torchrun import TorchrunPool, first_says, ranks, reports, under_torchrun

LAYER = ("bench", "layer", "--experts", "6", "--topk", "2", "--hidden", "32", "--intermediate", "16", "--validate")
ONCE = (
    "--layout",
    "flat",
    "--transport",
    "shm",
    "--tokens",
    "3",
    "--steps",
    "1",
    "--rounds",
    "1",
    "--threads",
    "1",
    "--timeout",
    "20",
)


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
        mine = file if bootstrap.rank == 0 else f"{file}.none"  # as on another machine
        again = CliRunner().invoke(app, [*LAYER, *ONCE, "--json", mine, "--resume"])
        broken = Path(mine).with_name("broken.json")
        if bootstrap.rank == 0:
            broken.write_text("no JSON")
        refused = CliRunner().invoke(app, [*LAYER, *ONCE, "--json", str(broken), "--resume"])
        return {
            "values": values,
            "failed": failed,
            "alone": alone,
            "reports": reports(),
            "code": ran.exit_code,
            "shown": ran.output,
            "again": (again.exit_code, again.output),
            "refused": (refused.exit_code, refused.output),
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
    assert [each["again"][0] for each in told] == [0, 0], told
    assert "1 cases were measured before" in told[0]["again"][1] and told[1]["again"][1] == ""
    assert not Path(f"{file}.none").exists()
    for each in told:
        assert each["refused"][0] == 2 and "a file that this version wrote" in each["refused"][1]


@pytest.fixture
def one_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
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


class Poison:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "said",
    [pickle.dumps(Poison()), pickle.dumps((1, 2)), b'{"neither": 1}', b"[]", b"3", b'{"dict": 3}'],
    ids=["poison", "pickle", "other keys", "list", "number", "no dict"],
)
def test_what_is_no_result_is_refused_and_never_unpickled(one_of_one: None, said: bytes) -> None:
    pool = TorchrunPool(1, threads_per_rank=1)
    pool._world = 2
    pool._store.set("call-1/result-1", said)  # type: ignore[arg-type]
    mine, other = pool.run(product, 3, timeout_s=5)
    assert (mine.value, mine.error) == (0, None)
    assert isinstance(other.error, MoEEpStoreError) and "rank 1" in str(other.error)


def fail_with(bootstrap: BootstrapConfig, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (MoEEpPeerError("rank 1 left", rank=1), MoEEpPeerError, "rank 1 left"),
        (torch.distributed.DistBackendError("closed by peer"), RuntimeError, "closed by peer"),
        (ValueError("not so"), MoEEpError, "ValueError: not so"),
    ],
)
def test_errors_arrive_with_their_class_and_text(
    one_of_one: None, raised: Exception, kind: type[Exception], text: str
) -> None:
    (result,) = TorchrunPool(1, threads_per_rank=1).run(fail_with, raised)
    assert type(result.error) is kind and str(result.error) == text
    assert "in fail_with" in str(result.error.__cause__)


def test_what_cannot_be_sent_as_text_is_refused(one_of_one: None) -> None:
    (result,) = TorchrunPool(1, threads_per_rank=1).run(lambda bootstrap: bootstrap)
    assert isinstance(result.error, MoEEpConfigError) and "got a BootstrapConfig" in str(result.error)


def test_a_store_that_is_gone_is_no_timeout(one_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    pool = TorchrunPool(1, threads_per_rank=1)
    pool._store = PrefixStore("p", TCPStore("127.0.0.1", host.port, is_master=False))
    assert pool.run(product, 3)[0].value == 0
    del host
    with pytest.raises(MoEEpStoreError, match="29999 does not answer"):
        pool.run(product, 3)


def test_an_earlier_start_leaves_no_results(one_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(torchrun, "resolve_store", lambda bootstrap: store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    results = []
    for restart, rank in (("0", "1"), ("1", "0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(torchrun, "_numbers", itertools.count())
        results.append(TorchrunPool(2, threads_per_rank=1).run(product, 3, timeout_s=0.05))
    assert (results[0][1].value, results[1][0].value) == (3, 0)
    assert isinstance(results[1][1].error, MoEEpTimeoutError)


def test_rank_0_leaves_after_the_others(one_of_one: None) -> None:
    pool = TorchrunPool(1, threads_per_rank=1)
    pool._here = replace(pool._here, world_size=2)
    leaving = threading.Thread(target=pool.__exit__, args=(None, None, None), daemon=True)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive(), "rank 1 has not read its results"
    pool._store.set("left-1", "")
    leaving.join()


def test_the_first_rank_says_it_for_all(one_of_one: None) -> None:
    assert first_says(lambda: [1, {"a": None}]) == [1, {"a": None}]
    with pytest.raises(MoEEpConfigError, match="not me"):
        first_says(lambda: fail_with(BootstrapConfig(1, 0), MoEEpConfigError("not me")))


def test_elsewhere_ranks_are_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with ranks(1) as pool:
        assert isinstance(pool, RankPool) and reports()
    assert first_says(lambda: 3) == 3


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
    ],
)
def test_a_lone_process_is_not_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert under_torchrun() is expected
