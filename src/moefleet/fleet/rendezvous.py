"""How ranks find each other before they share memory: numbered meetings over a ``torch.distributed`` store.

Nobody waits in vain for long: who fails says so at the meeting, and of ranks on one host each sees in the process table
whether another has ended. Only a rank of another host that is killed is waited for until the time-out.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..config import BootstrapConfig
from ..errors import config_error
from .stores import resolve_store
from .vigil import LOOK_S, Vigil
from .witness import identity, seen

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
"""Between two looks of a rank that waits at a meeting."""


class _Moved(Exception):
    """This rank has joined a running Fleet while it waited at another meeting."""


class Meeting(Vigil):
    """One gathering of all ranks, under a name of its own in the store, at which values are exchanged in steps.

    The store numbers the fleets: a rank's n-th meeting is everybody's n-th. One that is over, or that a rank missed, is
    closed for good, and whoever comes to it late moves on to the next. A running Fleet that changes its ranks meets
    under its own id and the next generation (:meth:`next_generation`), and announces that to whoever is new: a process
    that comes to a meeting finds the announcement, and joins there instead.

    Coming to a meeting waits for nobody. A rank that has much to do before ``create_fleet`` comes early, and hands its
    meeting over: its peers then learn at once if it does not get that far.

        meeting = Meeting(bootstrap)
        with meeting.announcing():
            ...  # what may fail, or be killed
            fleet = create_fleet(bootstrap, params, meeting=meeting)

    Attributes:
        fleet_id, generation: the name.
        last_tried: the last generation that this one tried to go on to.
        incarnation: this process's identity.
    """

    def __init__(self, bootstrap: BootstrapConfig) -> None:
        self._start(bootstrap, resolve_store(bootstrap))
        self._fresh = True
        while not self._answer_announcement():
            if self._take_ticket():
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

    def renewed(self, bootstrap: BootstrapConfig) -> Meeting:
        """This meeting, with the waits at it beginning now.

        Raises:
            MoEEpConfigError: the bootstrap is another rank's, or another group's.
        """
        if (bootstrap.rank, bootstrap.world_size) != (self.rank, self.world_size):
            got, came = f"rank {bootstrap.rank} of {bootstrap.world_size}", f"rank {self.rank} of {self.world_size}"
            raise config_error("create_fleet: bootstrap", got, f"{came}, as which it came to the meeting")
        self.bootstrap, self._deadline = bootstrap, time.monotonic() + bootstrap.timeout_s
        return self

    def _start(self, bootstrap: BootstrapConfig, root: Any) -> None:
        Vigil.__init__(self, bootstrap, root)
        self._fresh = False
        self._tickets = 0
        self.incarnation = secrets.randbits(62) if bootstrap.incarnation is None else bootstrap.incarnation
        # Two processes with one incarnation are two all the same.
        self._person = {"incarnation": self.incarnation, "nonce": secrets.token_hex(8), **identity()}
        self._tried: list[list[int]] = []

    def _name(self, fleet_id: int, generation: int) -> None:
        self.fleet_id, self.generation = fleet_id, generation
        self.last_tried = generation
        self.store = dist.PrefixStore(f"moefleet/{fleet_id}/{generation}", self._root)
        self._people = {}

    def _take_ticket(self) -> bool:
        """Go to this rank's next meeting; whether it is not over yet. Who comes first numbers it."""
        ticket = self._guard(self._root.add, f"moefleet/ticket/{self.rank}", 1)
        self._tickets += 1
        key, number = f"moefleet/fleet_of_ticket/{ticket}", ""
        if not self._guard(self._root.check, [key]):
            number = str(self._guard(self._root.add, "moefleet/fleets", 1))
        self._name(int(self._guard(self._root.compare_set, key, "", number)), 0)
        return not self._guard(self.store.check, ["closed"])

    def _claim(self) -> None:
        with self.announcing():
            if not self._try_claim(self.store):
                raise config_error(
                    "BootstrapConfig.rank",
                    f"{self.rank}, which another process of this Fleet has taken",
                    "a rank of its own for each process",
                    "a process that replaces a rank must be announced by update_topology on the ranks that stay",
                )
            self._take_seat()

    def _try_claim(self, store: Any) -> bool:
        mine = json.dumps(self._person)
        return bool(self._guard(store.compare_set, f"member/{self.rank}", "", mine).decode() == mine)

    def _take_seat(self) -> None:
        """Say which rank this process is on this store, and look who was that before: another group, by mistake?"""
        me, seat, chair = identity(), "moefleet/seat/{host}/{pid}/{born}", f"moefleet/chair/{self.rank}"
        self._guard(self._root.set, seat.format(**me), str(self.rank))
        before, mine = "", json.dumps(me)
        while (now := self._guard(self._root.compare_set, chair, before, mine).decode()) != mine:
            before, other = now, json.loads(now)
            still = self._guard(self._root.get, seat.format(**other)) == str(self.rank).encode()
            if self._fresh and still and other["host"] == me["host"] and not seen(other):
                raise config_error(
                    "BootstrapConfig.tcp_store",
                    f"one on which process {other['pid']}, which runs, is rank {self.rank} as well as this one",
                    "a store for each group",
                    "give each group a torch.distributed.PrefixStore of its own; a process that was replaced must end",
                )

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
        if self._tickets:  # its next meeting is again that of the others, who have taken none
            self._guard(self._root.add, f"moefleet/ticket/{self.rank}", -self._tickets)
        self._name(record[0], record[1])
        self._fresh = False
        self._take_seat()
        return True

    # Exchanges.

    def exchange(self, step: str, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run ``make`` here, publish what it returns (JSON values), and return every rank's, in rank order.

        Where ``make`` raises, all ranks learn it at once: this one re-raises, the others raise MoEEpPeerError.

        Raises:
            MoEEpPeerError: another rank has failed, or its process has ended.
            MoEEpTimeoutError: a rank did not come; the meeting is closed.
            MoEEpStoreError: the store did not answer.
        """
        try:
            mine = json.dumps(make())
        except BaseException as error:
            # The meeting stays open: a rank that comes later must learn of this, too, not wait for the next one.
            self.fail(error)
            raise
        got = self._gather(step, mine)
        while got is None:  # this rank was called to a running Fleet meanwhile
            got = self._gather(step, mine)
        self._fresh = False
        return got

    def _gather(self, step: str, mine: str) -> list[dict[str, Any]] | None:
        """Publish and read everybody's; ``None`` where this rank moved to another meeting."""
        here, keys = self.store, [f"{step}/{peer}" for peer in range(self.world_size)]
        self._guard(here.set, keys[self.rank], mine)
        try:
            for peer in range(self.world_size):
                self._wait(step, keys, peer)
        except _Moved:
            self._guard(here.set, "closed", "1")
            return None
        return [json.loads(self._guard(here.get, key)) for key in keys]

    def _wait(self, step: str, keys: list[str], peer: int) -> None:
        """Until ``keys[peer]`` is there. A rank that is not sure yet where it belongs also looks for announcements."""
        pause, next_look = SHORTEST_PAUSE_S, time.monotonic() + LOOK_S
        while not self._guard(self.store.check, [keys[peer]]):
            if self._fresh and self._answer_announcement():
                raise _Moved
            now = time.monotonic()
            if now >= self._deadline:
                self.close()
                raise self._late(step, [rank for rank, key in enumerate(keys) if not self.store.check([key])])
            if now >= next_look:
                # What a rank left behind before it ended counts.
                self.look({rank: key for rank, key in enumerate(keys) if rank >= peer})
                next_look = now + LOOK_S
            time.sleep(min(pause, max(0.0, self._deadline - now)))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Mark this meeting as over, so that whoever comes late does not join it."""
        self._guard(self.store.set, "closed", "1")
