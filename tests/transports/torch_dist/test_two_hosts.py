"""Two hosts for real, as far as the network goes: two network namespaces joined by a virtual cable."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefleet import BootstrapConfig, EpLayout, create_fleet, reference
from moefleet.fleet.stores import resolve_store
from tests.conformance.context import made, received, routed, sent
from tests.strategies import make_problem

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = "29417"
IP = shutil.which("ip") or ""


def ip(*words: str) -> None:
    done = subprocess.run([IP, *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Names of two network namespaces, each with the name of its end of the cable."""
    if not IP:
        pytest.skip("two hosts need the `ip` tool (iproute2)")
    tag = secrets.token_hex(3)
    names = [(f"moefleet-{tag}-{rank}", f"mf{tag}{rank}") for rank in range(2)]
    with ExitStack() as undo:
        try:
            for name, _ in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)  # and with it the cable
            (here, end), (there, other_end) = names
            ip("link", "add", end, "netns", here, "type", "veth", "peer", "name", other_end, "netns", there)
            for (name, link), address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"this machine allows no network namespaces (root or CAP_NET_ADMIN is needed): {error}")
        yield names


def start(rank: int, host: tuple[str, str]) -> subprocess.Popen[str]:
    name, link = host
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": link,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [IP, "netns", "exec", name, sys.executable, "-m", __name__],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_hosts(hosts: list[tuple[str, str]]) -> None:
    ranks = [start(rank, host) for rank, host in enumerate(hosts)]
    try:
        told = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    assert all("3 layouts agree with the reference" in text for text in told), told


def main() -> None:
    """One rank: "auto" finds the transport, and steps of every layout are held against the reference."""
    torch.set_num_threads(1)
    bootstrap = BootstrapConfig.from_env(device="cpu", timeout_s=60)
    bootstrap = replace(bootstrap, tcp_store=resolve_store(bootstrap))  # one for all three Fleets
    problem = make_problem(5, 2, 5, 64, 3, [7, 40])
    want = reference.identity_forward(problem.xs, *problem.routing, problem.num_experts)[bootstrap.rank]
    for layout in EpLayout:
        with create_fleet(bootstrap, problem.params(layout)) as fleet:
            assert fleet.name == "torch_dist", fleet.describe()
            assert "another domain" in fleet.passed_over.get("shm", "another domain"), fleet.passed_over
            parts = (part[bootstrap.rank] for part in (problem.xs, *problem.routing))
            x, ids, weights = parts
            for _ in range(3):
                with routed(fleet, ids, weights) as handle:
                    out = handle.dispatch(sent(x))
                    got = received(out)
                    rows = reference.compute(out, lambda tokens, _: tokens, fill=float("nan"))
                    torch.testing.assert_close(handle.combine(made(rows)).x.double(), want, rtol=0, atol=1e-5)
                assert got.rows.shape == out.expert_tensors.shape
    print("3 layouts agree with the reference", flush=True)


if __name__ == "__main__":
    main()
