"""Rounds: how ranks that share nothing but collectives exchange messages in any order.

A round is one ``all_to_all_single`` of equal blocks, in which every rank tells every other one thing (its
:class:`Status`), with its rows in the same block where they fit. A rank's n-th message goes in round n. So all ranks
issue the same collectives in the same order whatever each of them is doing, nothing that they disagree about can tear
a collective, and all of them read the same log, from which each concludes the same:

- A phase is complete once the log holds READY from every rank. What did not fit, rows or even their routing, follows
  then, in exchanges of their exact sizes, which every rank issues directly after the round that completed the phase.
- FAILED ends its step for everyone who reads it. Who fails posts that and goes on; it waits for nobody.
- A rank that waits and has nothing to say posts WAITING, so that rounds go on. If all do, nobody can go on: that is
  an error on all of them, naming the calls. A rank that has sent its rows of a phase and then given the step up posts
  IDLE as long as the others may need it.
- The size of a block follows the phases before (see ``sizing.py``).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch

from ...errors import MoEEpPeerError
from ...fleet.stepping import step_failed
from ...knobs import RowFormat
from ...substrate.control import SETS, Operation
from .delivery import Delivery, Part, follow_up
from .parcel import Parcel
from .sizing import BlockSize
from .status import Inline, Kind, Status, StatusCodec, StrangerError
from .wire import Flight, Lease, Wire

Key = tuple[int, Operation]


class Round(NamedTuple):
    """One round: its number, and the blocks that arrive, as ``W * capacity`` bytes."""

    number: int
    arriving: Lease
    capacity: int
    flight: Flight


class Letter(NamedTuple):
    """One rank's READY, and the round that brought it."""

    status: Status
    round: Round


class Bus:
    """This rank's end of the rounds. No call waits for a peer: :meth:`take` returns what there is to wait for.

    Args:
        rank, world_size: this rank in the group.
        fleet_id: see :class:`StatusCodec`.
        rows: how they travel.
        most_tokens, most_topk: ``M`` and the largest ``K``.

    Attributes:
        rounds: issued so far; ``exchanges``: collectives beside them.
        carried_bytes: what all of them carried to other ranks, statuses and padding included.
        error: what broke the group, after which nothing works any more.
    """

    def __init__(
        self,
        wire: Wire,
        rank: int,
        world_size: int,
        fleet_id: int,
        rows: RowFormat,
        most_tokens: int,
        most_topk: int,
    ) -> None:
        self.wire, self.rank, self.world_size = wire, rank, world_size
        self.rounds = self.exchanges = self.carried_bytes = 0
        self.error: Exception | None = None
        there, back = rows.hidden * rows.there_bytes, rows.returned_bytes
        self._row_bytes = {Operation.DISPATCH: there, Operation.COMBINE: back}
        self._scale_bytes = rows.scale_bytes
        self._codec = StatusCodec(fleet_id, world_size)
        most = most_tokens * (back + rows.scale_bytes + 8 * most_topk)
        self._size = BlockSize(world_size, self._codec.size, back, most)  # back is a multiple of there
        self._lock = threading.RLock()
        self._outbox: deque[tuple[Status, Parcel | None]] = deque()
        self._round: Round | None = None
        self._flights: list[Flight] = []  # exchanges that may be under way
        # What the log says: the same on all ranks that have read as far.
        self._letters: dict[Key, list[Letter | None]] = {}
        self._failed: dict[int, Status] = {}
        self._heard = [0] * world_size  # the highest step of each rank
        self._all_waiting: list[Status] = []
        # What concerns this rank alone.
        self._pending: dict[Key, Parcel | None] = {}  # own READY, not complete yet, with rows that are to follow
        self._abandoned: set[int] = set()
        self._complete: dict[Key, Delivery] = {}

    def post(self, status: Status, parcel: Parcel | None = None) -> None:
        """Send a message in the next round that is free. A parcel with ``rows`` is read before this returns; one
        without keeps its memory until the step ends.

        Raises:
            MoEEpPeerError: the step of this parcel has failed already; nothing is sent.
        """
        with self._lock:
            self.advance()
            if parcel is not None:
                self._raise_if_failed(status.step)
            if self.error is not None:
                return
            if self._round is None:
                self._issue(status, parcel)
            else:
                kept = None if parcel is None else parcel.gathered(self.wire.moves)._replace(mark=self.wire.mark())
                self._outbox.append((status, kept))

    def take(self, step: int, operation: Operation) -> Delivery | Flight | None:
        """This phase if it is complete, else the collective that has to end first; ``None`` after an error.

        Raises:
            MoEEpPeerError: the step has failed, or all ranks wait for one another.
        """
        key = step, operation
        with self._lock:
            self.advance()
            self._raise_if_failed(step)
            if key in self._complete:
                return self._complete.pop(key)
            if self.error is not None:
                return None
            self._raise_if_crossed(key)
            if self._round is None:
                self._issue(Status(Kind.WAITING, step, operation), None)
            assert self._round is not None
            return self._round.flight

    def abandon(self, step: int) -> None:
        """What may still come for this step is of no use to this rank."""
        with self._lock:
            for operation in (Operation.DISPATCH, Operation.COMBINE):
                self._complete.pop((step, operation), None)
            self._abandoned.add(step)
            self.wire.forget([(role, step % SETS) for role in ("out", "in")])

    def has_failed(self, step: int) -> bool:
        """Whether the log says that this step has failed: then every rank reads that, sooner or later."""
        return step in self._failed

    def advance(self, serve: bool = False) -> None:
        """Read the round if it has ended, and issue the next if there is something to send; with ``serve`` also if
        there is nothing, but others may need it."""
        with self._lock:
            try:
                while self.error is None:
                    if self._round is not None:
                        if not self._round.flight.done():
                            return
                        self._round.flight.wait(0)  # raises if it failed
                        ended, self._round = self._round, None
                        self._read(ended)
                    if self._outbox:
                        self._issue(*self._outbox.popleft())
                    elif serve and self.owes():
                        self._issue(Status(Kind.IDLE, 0, Operation.NONE), None)
                    else:
                        return
            except (RuntimeError, StrangerError) as error:
                self.error = error

    def owes(self) -> bool:
        """Whether peers may need this rank for what it has left behind, so that somebody must keep advancing."""
        with self._lock:
            waiting = bool(self._outbox) or any(step in self._abandoned for step, _ in self._pending)
            return waiting and self.error is None

    def idle(self) -> bool:
        """Whether no collective is under way."""
        with self._lock:
            self._flights = [flight for flight in self._flights if not flight.done()]
            return not self._flights and (self._round is None or self._round.flight.done())

    def stop(self) -> None:
        """Issue and read nothing more: what an aborted collective leaves is no message. Waits for no lock."""
        self.error = self.error or RuntimeError("the Fleet was destroyed")

    def drop(self) -> None:
        """Let go of everything that belongs to the group."""
        with self._lock:
            self.stop()
            self.wire.drop()
            self._round = None
            for kept in (self._outbox, self._flights, self._letters, self._pending, self._complete):
                kept.clear()

    # Rounds.

    def _issue(self, status: Status, parcel: Parcel | None) -> None:
        world, capacity = self.world_size, self._size.capacity
        end = capacity - self._codec.size
        # The round before is done, and with it what it sent.
        blocks = self.wire.room(("blocks", 0), world * capacity).view(world, capacity)
        lease = self.wire.lease(world * capacity)
        arriving = lease.memory.view(world, capacity)
        marks = [None if parcel is None else parcel.mark]
        if parcel is not None:
            self.wire.follow(parcel.mark, [parcel.table] if parcel.meta is None else [parcel.table, parcel.meta])
            status = status._replace(inline=parcel.fitting(end), counts=parcel.counts)
            if status.inline is Inline.ROWS:
                parcel.write(blocks, end, self.wire.moves)
                self._pending[status.step, status.operation] = None
            else:
                rows = 0 if parcel.rows is None else sum(parcel.counts)
                room = self._room(status.step, status.operation, "out", rows)
                kept = parcel.gathered(self.wire.moves, room.view(parcel.table.dtype))
                if status.inline is Inline.ROUTING:
                    kept.write_meta(blocks, end)
                self._pending[status.step, status.operation] = kept._replace(mark=self.wire.mark())
        self.wire.stamp(blocks, end, self._codec.encode(self.rounds + 1, status))
        look = arriving[:, max(0, end - self._size.look) :]
        try:
            flight = self.wire.exchange(arriving, blocks, look=look, after=[*marks, self.wire.mark()])
        except RuntimeError as error:
            self.error = error  # nobody knows what became of it
            raise
        self.rounds += 1
        self.carried_bytes += (world - 1) * capacity
        self._round = Round(self.rounds, lease, capacity, flight)

    def _read(self, ended: Round) -> None:
        statuses = self._codec.decode(ended.number, ended.flight.seen[:, -self._codec.size :])
        complete = []
        for rank, status in enumerate(statuses):
            if status.kind in (Kind.WAITING, Kind.IDLE):
                continue
            self._heard[rank] = max(self._heard[rank], status.step)
            if status.kind is Kind.FAILED:
                self._failed.setdefault(status.step, status)
                self._drop(status.step)
            elif status.step not in self._failed:
                key = status.step, status.operation
                letters = self._letters.setdefault(key, [None] * self.world_size)
                letters[rank] = Letter(status, ended)
                if None not in letters:
                    complete.append(key)
        for key in sorted(complete):
            if key in self._letters:  # and its step has not failed in the same round
                self._deliver(key, [letter for letter in self._letters.pop(key) if letter is not None])
        self._all_waiting = statuses if all(status.kind is Kind.WAITING for status in statuses) else []
        self._forget_before(min(self._heard) - SETS)

    def _drop(self, step: int) -> None:
        """What was sent, or is going to be, for a step that failed: no phase of it becomes complete any more."""
        for operation in (Operation.DISPATCH, Operation.COMBINE):
            self._letters.pop((step, operation), None)
            self._pending.pop((step, operation), None)
        if any(status.step == step for status, _ in self._outbox):
            self._outbox = deque(message for message in self._outbox if message[0].step != step)

    def _forget_before(self, oldest: int) -> None:
        """Steps before this one are over on all ranks."""
        if any(step < oldest for step in (*self._failed, *self._abandoned)):
            self._failed = {step: status for step, status in self._failed.items() if step >= oldest}
            self._abandoned = {step for step in self._abandoned if step >= oldest}

    # A phase that is complete.

    def _deliver(self, key: Key, letters: list[Letter]) -> None:
        step, operation = key
        statuses = [letter.status for letter in letters]
        widths = [0] * self.world_size
        if operation is Operation.DISPATCH:
            widths = [self._scale_bytes + 8 * status.topk for status in statuses]
            self._size.follow(statuses, widths)
        parcel, flights, follow = self._pending.pop(key), list[Flight](), list[Part]()
        if any(status.inline is not Inline.ROWS for status in statuses):
            coming = sum(s.counts[self.rank] for s in statuses if s.inline is not Inline.ROWS)
            rows = self._room(step, operation, "in", coming)
            follow, flights = follow_up(self.wire, self.rank, parcel, statuses, widths, rows)
            self.exchanges += len(flights)
            if parcel is not None:
                others = sum(parcel.counts) - parcel.counts[self.rank]
                width = widths[self.rank] if statuses[self.rank].inline is Inline.NOTHING else 0
                self.carried_bytes += others * (self._row_bytes[operation] + width)
            self._flights = [flight for flight in self._flights if not flight.done()] + flights
        if step not in self._abandoned:
            parts = [
                self._part(letter, rank, widths[rank], follow[rank] if follow else None)
                for rank, letter in enumerate(letters)
            ]
            self._complete[key] = Delivery(statuses, parts, flights)

    def _part(self, letter: Letter, rank: int, width: int, followed: Part | None) -> Part:
        """Rows of ``rank``. In its block they are at the front, meta rows and the status at the end."""
        status, lease, capacity = letter.status, letter.round.arriving, letter.round.capacity
        if followed is not None and status.inline is Inline.NOTHING:
            return followed
        base, count = lease.memory, status.counts[self.rank]
        rows, first = base, rank * capacity // self._row_bytes[status.operation]
        if followed is not None and status.inline is Inline.ROUTING:
            rows, first = followed.base, followed.first
        if not width:
            return Part(rows, first, count, base, held=lease)
        size, end = count * width, (rank + 1) * capacity - self._codec.size
        seen = letter.round.flight.seen[rank]
        at = len(seen) - self._codec.size - size
        routing = seen[at : at + size] if at >= 0 else base[end - size : end].cpu().numpy()
        return Part(rows, first, count, base, end - size, routing.reshape(count, width), lease)

    def _room(self, step: int, operation: Operation, role: str, rows: int) -> torch.Tensor:
        """Memory for rows, uint8 ``[rows, bytes]``. What concerns an abandoned step stays out of a later one's."""
        size = rows * self._row_bytes[operation]
        room = self.wire.empty(size) if step in self._abandoned else self.wire.room((role, step % SETS), size)
        return room.view(rows, self._row_bytes[operation])

    # Errors.

    def _raise_if_failed(self, step: int) -> None:
        if status := self._failed.get(step):
            raise step_failed(status.origin, step, status.operation, status.reason)

    def _raise_if_crossed(self, key: Key) -> None:
        everybody = self._all_waiting
        if not everybody or (everybody[self.rank].step, everybody[self.rank].operation) != key:
            return
        self._all_waiting = []
        mine = everybody[self.rank].call
        other = next((rank for rank, status in enumerate(everybody) if status.call != mine), self.rank)
        calls = ", ".join(f"rank {rank} in {status.call}" for rank, status in enumerate(everybody))
        raise MoEEpPeerError(
            f"all ranks wait for one another, {calls}; all ranks must make the same calls in the same order",
            rank=other,
            reason=f"it waits in {everybody[other].call}",
        )
