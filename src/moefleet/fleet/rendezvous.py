"""How ranks find each other before they share memory: numbered meetings over a ``torch.distributed`` store."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import BootstrapConfig
from ..errors import MoEEpError, MoEEpPeerError, MoEEpStoreError, MoEEpTimeoutError, config_error
from .agreement.history import address

_stores: dict[tuple[str, int], dist.TCPStore] = {}
"""Those made from the environment: a process has one for an address, for all its Fleets and for as long as it lives."""


def _store_at(host: str, port: int, is_master: bool, timeout_s: float) -> dist.TCPStore:
    if (host, port) not in _stores:
        timeout = timedelta(seconds=timeout_s)
        _stores[host, port] = dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
    return _stores[host, port]


def resolve_store(bootstrap: BootstrapConfig) -> Any:
    """The store of this group: the one given, the process group's, or (``auto_bootstrap``) one from the environment."""
    if bootstrap.tcp_store is not None:
        return bootstrap.tcp_store
    if bootstrap.process_group is not None:
        from torch.distributed.distributed_c10d import _get_process_group_store

        return _get_process_group_store(bootstrap.process_group)
    if bootstrap.world_size == 1:
        return dist.HashStore()
    if bootstrap.auto_bootstrap and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            # Under torchrun the agent already hosts a store on this port.
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return _store_at(host, port, bootstrap.rank == 0 and not hosted, bootstrap.timeout_s)
        except Exception as error:
            raise MoEEpStoreError(f"no store at {host}:{port}: {error}") from error
    raise config_error(
        "BootstrapConfig",
        "neither tcp_store nor process_group, and no MASTER_ADDR and MASTER_PORT in the environment",
        "one of the three for world_size > 1",
        "start ranks with moefleet.launch or torchrun, or pass a store",
    )


LONGEST_PAUSE_S = 0.02
"""Between two looks of a rank that waits for a new Fleet, or for a running one to announce it."""


class _Moved(Exception):
    """This rank has joined a running Fleet while it waited at another meeting."""


class Meeting:
    """One gathering of all ranks, under a name of its own in the store, at which values are exchanged in steps.

    The store numbers the fleets: a rank's n-th meeting is everybody's n-th. One that is over, or that a rank missed, is
    closed for good, and whoever comes to it late moves on to the next. A running Fleet that changes its ranks meets
    under its own id and the next generation (:meth:`next_generation`), and announces that to whoever is new: a process
    that comes to a meeting finds the announcement, and joins there instead.

    Attributes:
        fleet_id, generation: the name.
        last_tried: the last generation that this one tried to go on to.
        incarnation: this process's identity.
        store: what belongs to this meeting.
    """

    rank: int
    world_size: int

    def __init__(self, bootstrap: BootstrapConfig) -> None:
        self._start(bootstrap, resolve_store(bootstrap))
        self._fresh = True
        while not self._answer_announcement():
            self._ticket = ticket = self._guard(self._root.add, f"moefleet/ticket/{self.rank}", 1)
            key = f"moefleet/fleet_of_ticket/{ticket}"
            if self.rank == 0:
                number = self._guard(self._root.add, "moefleet/fleets", 1)
                self._guard(self._root.set, key, str(number))
            else:
                try:
                    if not self._wait(self._root, key):
                        raise self._late("the start of a Fleet", [0])
                except _Moved:
                    return
            self._name(int(self._guard(self._root.get, key)), 0)
            if not self._guard(self.store.check, ["closed"]):
                self._claim()
                return

    @classmethod
    def next_generation(cls, before: Meeting, bootstrap: BootstrapConfig) -> Meeting:
        """The meeting at which the ranks of ``before`` that stay meet those that are new, under the new bootstrap."""
        meeting = cls.__new__(cls)
        meeting._start(bootstrap, before._root if bootstrap.tcp_store is None else resolve_store(bootstrap))
        # One that failed is closed, by whoever noticed, and never used again.
        before.last_tried += 1
        meeting._name(before.fleet_id, before.last_tried)
        while meeting._guard(meeting.store.check, ["closed"]):
            before.last_tried += 1
            meeting._name(before.fleet_id, before.last_tried)
        meeting._claim()
        record = json.dumps([meeting.fleet_id, meeting.generation, meeting.world_size])
        for rank in range(meeting.world_size):
            meeting._guard(meeting._root.set, f"moefleet/join/{rank}", record)
        return meeting

    def _start(self, bootstrap: BootstrapConfig, root: Any) -> None:
        self.bootstrap, self._root = bootstrap, root
        self._fresh = False
        self._ticket = 0
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        self.incarnation = secrets.randbits(62) if bootstrap.incarnation is None else bootstrap.incarnation
        self._deadline = time.monotonic() + bootstrap.timeout_s
        self._tried: list[list[int]] = []

    def _name(self, fleet_id: int, generation: int) -> None:
        self.fleet_id, self.generation = fleet_id, generation
        self.last_tried = generation
        self.store = dist.PrefixStore(f"moefleet/{fleet_id}/{generation}", self._root)

    def _claim(self) -> None:
        if not self._try_claim(self.store):
            raise config_error(
                "BootstrapConfig.rank",
                f"{self.rank}, which another process of this Fleet has taken",
                "a rank of its own for each process",
                "a process that replaces a rank must be announced by update_topology on the ranks that stay",
            )

    def _try_claim(self, store: Any) -> bool:
        mine = str(self.incarnation)
        return bool(self._guard(store.compare_set, f"member/{self.rank}", "", mine).decode() == mine)

    def _announcement(self) -> list[int] | None:
        """Fleet id, generation and world size of a running Fleet that calls for this rank; each is tried once."""
        key = f"moefleet/join/{self.rank}"
        if not self._guard(self._root.check, [key]):
            return None
        record: list[int] = json.loads(self._guard(self._root.get, key))
        return None if record in self._tried or record[2] != self.world_size else record

    def _answer_announcement(self) -> bool:
        """Join a running Fleet that has announced this rank as new, unless somebody else has."""
        record = self._announcement()
        if record is None:
            return False
        self._tried.append(record)
        elsewhere = dist.PrefixStore(f"moefleet/{record[0]}/{record[1]}", self._root)
        if self._guard(elsewhere.check, ["closed"]) or not self._try_claim(elsewhere):
            return False
        self._give_ticket_back()
        self._name(record[0], record[1])
        self._fresh = False
        return True

    def _give_ticket_back(self) -> None:
        """This rank joins a running Fleet after all: its next meeting is again that of the others."""
        if self._ticket:
            self._guard(self._root.add, f"moefleet/ticket/{self.rank}", -1)
            if self.rank == 0:
                self._guard(self._root.delete_key, f"moefleet/fleet_of_ticket/{self._ticket}")

    def exchange(self, step: str, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run ``make`` here, publish what it returns (JSON values), and return every rank's, in rank order.

        Where ``make`` raises, all ranks learn it at once: this one re-raises, the others raise MoEEpPeerError.

        Raises:
            MoEEpPeerError: another rank's ``make`` raised.
            MoEEpTimeoutError: a rank did not come; the meeting is closed.
            MoEEpStoreError: the store did not answer.
        """
        failure: Exception | None = None
        try:
            mine = make()
        except Exception as error:
            failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
        if failure is None:
            got = self._gather(step, json.dumps(mine))
            while got is None:  # this rank was called to a running Fleet meanwhile
                got = self._gather(step, json.dumps(mine))
        else:
            # The meeting stays open: a rank that comes later must learn of this, too, not wait for the next one.
            self._guard(self.store.set, f"{step}/{self.rank}", json.dumps(mine))
            raise failure
        self._fresh = False
        return got

    def _gather(self, step: str, mine: str) -> list[dict[str, Any]] | None:
        """Publish and read everybody's; ``None`` where this rank moved to another meeting."""
        here, keys = self.store, [f"{step}/{peer}" for peer in range(self.world_size)]
        self._guard(here.set, keys[self.rank], mine)
        got = []
        try:
            for peer, key in enumerate(keys):
                if not self._wait(here, key):
                    self.close()
                    raise self._late(step, [peer for peer, late in enumerate(keys) if not here.check([late])])
                value = json.loads(self._guard(here.get, key))
                if "error" in value:
                    error = value["error"]
                    raise MoEEpPeerError(f"rank {peer} could not build the Fleet: {error}", rank=peer, reason=error)
                got.append(value)
        except _Moved:
            self._guard(here.set, "closed", "1")
            return None
        return got

    def close(self) -> None:
        """Mark this meeting as over, so that whoever comes late does not join it."""
        self._guard(self.store.set, "closed", "1")

    def remaining_s(self) -> float:
        """What is left of the bootstrap's ``timeout_s``, in seconds."""
        return max(0.01, self._deadline - time.monotonic())

    def _wait(self, store: Any, key: str) -> bool:
        """Whether the key came in time. A rank that is not sure yet where it belongs also looks for announcements."""
        pause = 0.001
        while self._fresh and time.monotonic() < self._deadline:
            if self._guard(store.check, [key]):
                return True
            if self._answer_announcement():
                raise _Moved
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if self._fresh:
            return False
        try:
            store.wait([key], timedelta(seconds=self.remaining_s()))
        except Exception:
            if time.monotonic() >= self._deadline - 0.05:
                return False
            raise self._lost() from None
        return True

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
