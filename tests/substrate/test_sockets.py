"""The sockets between ranks: who may connect, what is passed over them, and what their end means."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moefleet import MoEEpPeerError, MoEEpTimeoutError, MoEEpTransportError
from moefleet.substrate import sockets
from moefleet.substrate.sockets import DeathWatcher, Mesh, namespace_id
from tests.substrate.blocks import HANG_S, at_once


@pytest.fixture
def meshes() -> Iterator[list[Mesh]]:
    made = [Mesh(rank, 3) for rank in range(3)]
    yield made
    for mesh in made:
        mesh.close()


def connect(meshes: list[Mesh], timeout_s: float = HANG_S, without: tuple[int, ...] = ()) -> list:
    addresses, tokens = [mesh.address for mesh in meshes], [mesh.token for mesh in meshes]
    present = [mesh for mesh in meshes if mesh.rank not in without]
    return at_once(*(lambda mesh=mesh: mesh.connect(addresses, tokens, timeout_s) for mesh in present))


def test_every_two_ranks_are_connected(meshes: list[Mesh]) -> None:
    assert connect(meshes) == [None] * 3
    for mesh in meshes:
        assert sorted(mesh.peers) == [rank for rank in range(3) if rank != mesh.rank]
    for one in meshes:
        for other in meshes:
            if one is not other:
                one.peers[other.rank].sendall(bytes([one.rank]))
                assert other.peers[one.rank].recv(1) == bytes([one.rank])


def test_peers_are_in_rank_order_whoever_connected_first(meshes: list[Mesh]) -> None:
    addresses, tokens = [mesh.address for mesh in meshes], [mesh.token for mesh in meshes]
    early = [mesh for mesh in meshes if mesh.rank != 1]
    come = threading.Event()

    def connect_late() -> None:
        assert come.wait(HANG_S)
        meshes[1].connect(addresses, tokens, HANG_S)

    def connect_early(mesh: Mesh) -> None:
        mesh._look = come.set  # rank 0 looks around only once rank 2 has been taken
        mesh.connect(addresses, tokens, HANG_S)

    at_once(connect_late, *(lambda mesh=mesh: connect_early(mesh) for mesh in early))
    assert list(meshes[0].peers) == [1, 2]


def test_no_file_is_made(meshes: list[Mesh]) -> None:
    for mesh in meshes:
        assert not os.path.exists(mesh.address)
        name = mesh._listener.getsockname()
        assert name == b"\0" + mesh.address.encode()
    assert len({mesh.address for mesh in meshes}) == len({mesh.token for mesh in meshes}) == 3


def test_descriptors_reach_every_peer(meshes: list[Mesh]) -> None:
    connect(meshes)
    own = []
    for mesh in meshes:
        fd = os.memfd_create("some")
        os.write(fd, f"of rank {mesh.rank}".encode())
        own.append(fd)
    got = at_once(*(lambda mesh=mesh: mesh.exchange_fds(own[mesh.rank], HANG_S) for mesh in meshes))
    for rank, fds in enumerate(got):
        assert fds[rank] == own[rank]
        assert [os.pread(fd, 99, 0) for fd in fds] == [b"of rank 0", b"of rank 1", b"of rank 2"]
    for fd in {fd for fds in got for fd in fds}:
        os.close(fd)


def test_who_does_not_connect_is_named(meshes: list[Mesh]) -> None:
    addresses, tokens = [mesh.address for mesh in meshes], [mesh.token for mesh in meshes]
    # Rank 1 first: what it says to rank 0 lies there, however late rank 0 comes to read it.
    outcomes = [at_once(lambda mesh=mesh: mesh.connect(addresses, tokens, 0.2))[0] for mesh in (meshes[1], meshes[0])]
    assert all(isinstance(error, MoEEpTimeoutError) and error.ranks == (2,) for error in outcomes), outcomes
    assert "rank 0 waited 0.2 s for a connection from ranks [2]" in str(outcomes[1])


def bad_news() -> None:
    raise MoEEpPeerError("rank 2 is out of memory", rank=2, reason="out of memory")


def test_a_rank_that_waits_in_vain_asks_why() -> None:
    made = [Mesh(rank, 3, bad_news) for rank in range(3)]
    made[2].close()
    for outcome in connect(made, without=(2,)):
        assert isinstance(outcome, MoEEpPeerError) and outcome.reason == "out of memory", outcome
    made[0].close()
    with pytest.raises(MoEEpPeerError, match="out of memory"):  # and where its connection is refused
        made[1].connect([mesh.address for mesh in made], [mesh.token for mesh in made], HANG_S)
    made[1].close()


def test_a_lower_rank_that_is_gone_is_named(meshes: list[Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_WHY_S", 0.05)
    meshes[0].close()
    with pytest.raises(MoEEpTransportError, match=r"connect failed .* reaching rank 0"):
        meshes[1].connect([mesh.address for mesh in meshes], [mesh.token for mesh in meshes], 1.0)


def strangers(address: str) -> list[socket.socket]:
    """Somebody else on this host: one without the token, one who hangs up, one who says too little."""
    made = []
    for said in (sockets._HELLO.pack(12345, 1), None, b"hi"):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect("\0" + address)
        if said is None:
            link.close()
            continue
        link.sendall(said)
        made.append(link)
    made[-1].shutdown(socket.SHUT_WR)
    return made


def test_strangers_are_turned_away_and_do_no_harm(meshes: list[Mesh]) -> None:
    links = [link for mesh in meshes[:2] for link in strangers(mesh.address)]
    assert connect(meshes) == [None] * 3
    assert all(sorted(mesh.peers) == [rank for rank in range(3) if rank != mesh.rank] for mesh in meshes)
    for link in links:
        link.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b"", "nothing of ours was sent"
        link.close()


def test_a_silent_stranger_does_not_hold_up_the_ranks_for_ever(
    meshes: list[Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_HELLO_S", 0.5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect("\0" + meshes[0].address)
        assert connect(meshes) == [None] * 3


def test_a_token_of_another_rank_is_not_enough(meshes: list[Mesh]) -> None:
    """Rank 2's token does not make one rank 1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as thief:
        thief.connect("\0" + meshes[0].address)
        thief.sendall(sockets._HELLO.pack(meshes[2].token, 1))
        assert connect(meshes) == [None] * 3
        thief.settimeout(5.0)
        assert thief.recv(1) == b""


@pytest.mark.parametrize("sent", [False, True], ids=["before_sending", "after_sending"])
def test_a_rank_that_ends_while_descriptors_are_exchanged(
    meshes: list[Mesh], sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_WHY_S", 0.05)
    connect(meshes)
    fd = os.memfd_create("some")
    before = len(os.listdir("/proc/self/fd"))
    if sent:
        for link in meshes[2].peers.values():
            socket.send_fds(link, [b"\1"], [fd])
        meshes[2].peers[0].close()
        meshes[2].peers[1].close()
    else:
        meshes[2].close()
    outcomes = at_once(*(lambda mesh=mesh: mesh.exchange_fds(fd, HANG_S) for mesh in meshes[:2]))
    for outcome in outcomes:
        if sent and isinstance(outcome, list):
            for taken in set(outcome) - {fd}:
                os.close(taken)
            continue
        assert isinstance(outcome, MoEEpPeerError) and outcome.rank == 2, outcome
    assert len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left behind"
    os.close(fd)


def test_a_rank_that_is_silent_while_descriptors_are_exchanged(meshes: list[Mesh]) -> None:
    connect(meshes)
    fd = os.memfd_create("some")
    with pytest.raises(MoEEpTimeoutError, match=r"waited 0\.1 s for the memory of rank 1") as caught:
        meshes[0].exchange_fds(fd, 0.1)
    assert caught.value.ranks == (1,)
    os.close(fd)


def test_one_namespace_for_this_host_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = namespace_id()
    assert mine == namespace_id() and ":" in mine
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert namespace_id() != mine, "memory is passed to processes of the same user only"


# Deaths.


class Deaths:
    """What a watcher reported."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self._some = threading.Event()

    def __call__(self, rank: int) -> None:
        self.ranks.append(rank)
        self._some.set()

    def wait(self) -> None:
        assert self._some.wait(HANG_S), "no death was reported"
        self._some.clear()


def test_the_end_of_a_peers_sockets_is_its_death(meshes: list[Mesh]) -> None:
    connect(meshes)
    deaths = Deaths()
    watcher = DeathWatcher(meshes[1], deaths)
    time.sleep(0.02)
    assert deaths.ranks == []
    meshes[2].close()
    deaths.wait()
    assert deaths.ranks == [2]
    meshes[0].close()
    deaths.wait()
    assert deaths.ranks == [2, 0], "each once"
    watcher.close()
    watcher.close()


def test_a_watcher_ends_without_a_death(meshes: list[Mesh]) -> None:
    connect(meshes)
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    watchers = [DeathWatcher(mesh, lambda rank: None) for mesh in meshes]
    assert len(set(threading.enumerate()) - before[0]) == 3
    for watcher in watchers:
        watcher.close()
    assert not set(threading.enumerate()) - before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_closing_twice_is_fine(meshes: list[Mesh]) -> None:
    connect(meshes)
    for _ in range(2):
        for mesh in meshes:
            mesh.close()
