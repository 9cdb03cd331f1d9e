"""What the ranks of one meeting know of each other, so that nobody waits in vain: who has failed, and who has ended."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..config import BootstrapConfig
from ..errors import MoEEpError, MoEEpPeerError, MoEEpStoreError, MoEEpTimeoutError
from .agreement.history import address
from .stepping import describe
from .witness import ENDED, seen

LOOK_S = 0.1
"""How often a rank that waits looks whether somebody has failed or ended."""

ASK = 8
"""Ranks that it then asks after, of those that it has not seen come."""

REASON_CHARS = 2000
"""The most that is passed on of an error's text."""

T = TypeVar("T")


class Vigil:
    """One rank's view of a meeting, which keeps its key-value pairs in ``store``.

    Attributes:
        bootstrap, rank, world_size: who this rank is.
        store: what belongs to this meeting. ``member/<rank>`` in it says which process a rank is.
    """

    store: Any

    def __init__(self, bootstrap: BootstrapConfig, root: Any) -> None:
        self.bootstrap, self._root = bootstrap, root
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        self._deadline = time.monotonic() + bootstrap.timeout_s
        self._people: dict[int, dict[str, Any]] = {}
        self._asked = 0

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """What goes wrong inside is told to the ranks that wait for this one at the meeting, before it goes on."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell all ranks, those that wait at this meeting and those that come later, that no Fleet comes of it.

        What a rank says of itself counts more than what others say of it. Never raises.
        """
        origin, reason = self.rank, describe(error)
        if isinstance(error, MoEEpPeerError) and error.rank >= 0:
            origin, reason = error.rank, error.reason
        late = list(error.ranks) if isinstance(error, MoEEpTimeoutError) else []
        record = json.dumps({"rank": origin, "by": self.rank, "reason": reason[:REASON_CHARS], "late": late})
        with contextlib.suppress(Exception):
            if origin == self.rank and not late:
                self.store.set("failed", record)
            else:
                self.store.compare_set("failed", "", record)

    def look(self, keys: dict[int, str] | None = None) -> None:
        """See whether this meeting has failed, without waiting.

        Args:
            keys: ranks whose end matters, each as long as it has not written this key; ``None`` for all, always.

        Raises:
            MoEEpPeerError: a rank has failed, or its process, on this host, has ended.
            MoEEpTimeoutError: a rank gave up waiting for others.
        """
        self._ask_around()
        wanted = range(self.world_size) if keys is None else keys
        ended = [rank for rank in wanted if rank in self._people and seen(self._people[rank]) == ENDED]
        if self._guard(self.store.check, ["failed"]):
            raise self._failure(json.loads(self._guard(self.store.get, "failed")))
        for rank in ended:
            if keys is None or not self._guard(self.store.check, [keys[rank]]):
                raise MoEEpPeerError(f"rank {rank} could not build the Fleet: {ENDED}", rank=rank, reason=ENDED)

    def person(self, rank: int) -> dict[str, Any]:
        """Which process a rank is, see :func:`identity`. It has come to this meeting."""
        if rank not in self._people:
            self._people[rank] = json.loads(self._guard(self.store.get, f"member/{rank}"))
        return self._people[rank]

    def _ask_around(self) -> None:
        """Learn who has come: a few ranks at a time, as all ranks ask one store."""
        strangers = [rank for rank in range(self.world_size) if rank not in self._people]
        self._asked += ASK
        for rank in (strangers[(self._asked + n) % len(strangers)] for n in range(min(ASK, len(strangers)))):
            if self._guard(self.store.check, [f"member/{rank}"]):
                self.person(rank)

    def _failure(self, record: dict[str, Any]) -> MoEEpError:
        rank, reason, late = record["rank"], record["reason"], record["late"]
        if late:
            return MoEEpTimeoutError(f"rank {record['by']} gave up: {reason}", ranks=late)
        return MoEEpPeerError(f"rank {rank} could not build the Fleet: {reason}", rank=rank, reason=reason)

    def attend(self, connect: Callable[[Any], T]) -> T:
        """Run a call that waits for all ranks inside a library, and look after them meanwhile.

        Args:
            connect: gets a store of these ranks, through a connection of its own: one that waits serves nobody else. It
                runs in a thread of its own, which is left alone once a rank has failed.

        Raises:
            MoEEpPeerError: another rank has failed, or its process has ended.
            MoEEpTimeoutError: the call did not come back in time.
        """
        ended: list[tuple[T | None, BaseException | None]] = []
        private = self._guard(self._private_store)

        def run() -> None:
            try:
                ended.append((connect(private), None))
            except BaseException as error:
                ended.append((None, error))

        thread = threading.Thread(target=run, name="moefleet-connect", daemon=True)
        thread.start()
        while not ended:
            thread.join(min(LOOK_S, self.remaining_s()))
            if not ended:
                self.look()
                if time.monotonic() >= self._deadline:
                    raise self._late("a connection", [])
        result, error = ended[0]
        if error is not None:
            with contextlib.suppress(MoEEpStoreError):
                self.look()  # a peer that failed knows more
            raise error
        return result  # type: ignore[return-value]

    def _private_store(self) -> Any:
        """A store of this meeting's ranks for another thread. Not ``clone()``: with torch 2.11 on GPUs, answers to a
        clone and to its original were seen to change places."""
        store = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            return self.store
        name = self.store.compare_set("private", "", uuid.uuid4().hex).decode()
        timeout = timedelta(seconds=self.remaining_s())
        client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.PrefixStore(f"moefleet/private/{name}", client)

    def remaining_s(self) -> float:
        """What is left of the bootstrap's ``timeout_s``, in seconds."""
        return max(0.01, self._deadline - time.monotonic())

    def _guard(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except MoEEpError:
            raise
        except Exception as error:
            raise self._lost() from error

    def _lost(self) -> MoEEpStoreError:
        return MoEEpStoreError(
            f"the store at {address(self._root)} did not answer rank {self.rank}; is the process that hosts it alive?"
        )

    def _late(self, what: str, ranks: list[int]) -> MoEEpTimeoutError:
        return MoEEpTimeoutError(
            f"building a Fleet: rank {self.rank} waited {self.bootstrap.timeout_s:g} s (BootstrapConfig.timeout_s) "
            f"for ranks {ranks} at {what!r}",
            ranks=ranks,
        )
