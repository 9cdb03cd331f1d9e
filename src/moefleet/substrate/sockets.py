"""One Unix socket between every two ranks of a host: segments are passed over it, and its end means a death.

The sockets live in Linux's abstract namespace, so no file ever exists. The peer's credentials are checked, and what
arrives is read as numbers only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from ..errors import MoEEpPeerError, MoEEpTimeoutError, MoEEpTransportError

_HELLO = struct.Struct("<QI")
_HELLO_S = 10.0  # how long somebody who connects may take to say who it is
_LOOK_S = 0.1  # how often a rank that waits for a connection looks whether it waits in vain
_WHY_S = 2.0  # how long it looks for the reason of a connection that broke: a busy peer may be slow to say it
_CREDENTIALS = struct.Struct("3i")


def namespace_id() -> str:
    """What ranks must share to reach each other here: one kernel, one network namespace and one user."""
    with open("/proc/sys/kernel/random/boot_id") as text:
        boot = text.read().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}:{os.getuid()}"


class Mesh:
    """This rank's sockets to all others.

    Usage: construct, publish ``address`` and ``token`` to the peers, then :meth:`connect`.

    Args:
        look: called while this rank waits; raises where it waits in vain.
    """

    def __init__(self, rank: int, world_size: int, look: Callable[[], None] = lambda: None) -> None:
        self.rank, self.world_size = rank, world_size
        self._look = look
        self.token = secrets.randbits(63)
        self.address = f"moefleet-{secrets.token_hex(12)}"
        self.peers: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(world_size)

    def connect(self, addresses: list[str], tokens: list[int], timeout_s: float) -> None:
        """Connect to lower ranks, accept higher ones. A rank proves itself by the token that it published.

        Raises:
            MoEEpTimeoutError: a rank did not connect in time.
            MoEEpTransportError: a socket call failed, or a stranger connected.
        """
        deadline = time.monotonic() + timeout_s
        for peer in range(self.rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                link.connect("\0" + addresses[peer])
                link.sendall(_HELLO.pack(self.token, self.rank))
            except OSError as error:
                link.close()
                self._ask_why()
                raise MoEEpTransportError("connect", error.errno or 0, f"reaching rank {peer}", str(error)) from error
            self.peers[peer] = link
        while missing := sorted(set(range(self.rank + 1, self.world_size)) - set(self.peers)):
            left = deadline - time.monotonic()
            self._listener.settimeout(min(_LOOK_S, max(0.01, left)))
            try:
                link, _ = self._listener.accept()
            except TimeoutError as error:
                self._look()
                if left > _LOOK_S:
                    continue
                raise MoEEpTimeoutError(
                    f"shared memory: rank {self.rank} waited {timeout_s:g} s for a connection from ranks {missing}",
                    ranks=missing,
                ) from error
            _, uid, _ = _credentials(link)
            link.settimeout(min(_HELLO_S, max(0.01, deadline - time.monotonic())))
            token, peer = _read_hello(link)
            if peer not in missing or token != tokens[peer] or uid != os.getuid():
                link.close()  # a stranger on this host: nothing of ours was sent
                continue
            self.peers[peer] = link
        self._listener.close()
        self.peers = dict(sorted(self.peers.items()))  # whoever came first: errors name the lowest rank

    def exchange_fds(self, fd: int, timeout_s: float) -> list[int]:
        """Give every peer this rank's descriptor and take theirs. Returns one per rank, for the caller to close."""
        fds = [-1] * self.world_size
        fds[self.rank] = fd
        try:
            for peer, link in self.peers.items():
                link.settimeout(timeout_s)
                with self._naming(peer, timeout_s):
                    socket.send_fds(link, [b"\1"], [fd])
            for peer, link in self.peers.items():
                with self._naming(peer, timeout_s):
                    data, got, _, _ = socket.recv_fds(link, 1, 1)
                    if not data or len(got) != 1:
                        raise ConnectionResetError
                    fds[peer] = got[0]
        except BaseException:
            for taken in fds:
                if taken not in (-1, fd):
                    os.close(taken)
            raise
        return fds

    @contextlib.contextmanager
    def _naming(self, peer: int, timeout_s: float) -> Iterator[None]:
        """Errors of a socket as errors that name the rank at its other end."""
        try:
            yield
        except TimeoutError as error:
            raise MoEEpTimeoutError(
                f"shared memory: waited {timeout_s:g} s for the memory of rank {peer}", ranks=[peer]
            ) from error
        except OSError as error:
            self._ask_why()
            text = f"rank {peer} ended while the Fleet was being built"
            raise MoEEpPeerError(text, rank=peer, reason="ended") from error

    def _ask_why(self) -> None:
        """A peer that closes its sockets says why about then."""
        end = time.monotonic() + _WHY_S
        while time.monotonic() < end:
            self._look()
            time.sleep(0.01)

    def close(self) -> None:
        """Close everything; peers see end-of-file. Idempotent."""
        self._listener.close()
        for link in self.peers.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


class DeathWatcher:
    """A thread that learns from the operating system that a peer's process is gone.

    End-of-file on the peer's socket comes first (sub-millisecond); a pidfd is the second means, for sockets that a
    forked child of the peer keeps open. The thread only calls ``on_death(rank)``, which must only store to memory.
    """

    def __init__(self, mesh: Mesh, on_death: Callable[[int], None]) -> None:
        self._links = dict(mesh.peers)
        self._on_death = on_death
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pidfds: dict[int, int] = {}
        for peer, link in self._links.items():
            pid, _, _ = _credentials(link)
            with contextlib.suppress(OSError, ValueError):  # gone already, or of another pid namespace
                self._pidfds[os.pidfd_open(pid)] = peer
        self._thread = threading.Thread(target=self._watch, name="moefleet-death-watcher", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        owner = {link.fileno(): peer for peer, link in self._links.items()} | self._pidfds
        for fd in (*owner, self._stop_read):
            poll.register(fd, select.POLLIN)
        dead: set[int] = set()
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop_read:
                    return
                poll.unregister(fd)
                if (peer := owner[fd]) not in dead:
                    dead.add(peer)
                    self._on_death(peer)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._stop_write < 0:
            return
        os.write(self._stop_write, b"\0")
        self._thread.join()
        for fd in (self._stop_read, self._stop_write, *self._pidfds):
            os.close(fd)
        self._stop_write = -1


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def _read_hello(link: socket.socket) -> tuple[int, int]:
    """Token and rank that the other end says, or -1 for both where it says nothing of the kind."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < _HELLO.size and (part := link.recv(_HELLO.size - len(data))):
            data += part
    return _HELLO.unpack(data) if len(data) == _HELLO.size else (-1, -1)
