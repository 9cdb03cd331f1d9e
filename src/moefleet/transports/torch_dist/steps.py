"""The sequence of steps of a Fleet, on top of its rounds: each phase sent, waited for, or given up for all to see."""

from __future__ import annotations

import contextlib
import time

from ...errors import MoEEpError, MoEEpPeerError, MoEEpTimeoutError, MoEEpTransportError
from ...fleet.stepping import StepWindow, blame
from ...fleet.witness import ENDED
from ...substrate.control import Operation
from ...substrate.waiting import POLL_S
from .bus import Bus
from .delivery import Delivery
from .janitor import Janitor
from .parcel import Parcel
from .presence import LEFT, WAITS, Presence
from .status import Kind, Status, StrangerError
from .wire import Flight

_LOOK_S = 0.5  # how often a rank that waits looks whether another has left or ended
_GONE_S = 1.0  # how long it looks for the culprit after the group broke
_REBUILD = "build another Fleet of the ranks that are left"
_ADVICE = f"a collective needs all ranks: {_REBUILD}"


class Steps(StepWindow):
    """See :class:`moefleet.fleet.halves.StepKeeper`."""

    def __init__(self, bus: Bus, presence: Presence, janitor: Janitor, timeout_s: float) -> None:
        super().__init__()
        self._bus, self._presence, self._janitor, self._timeout_s = bus, presence, janitor, timeout_s
        self._next: dict[int, Operation] = {}  # the phase that each open step sends next
        self._broken: MoEEpError | None = None
        self.waited_s = 0.0

    def begin(self) -> int:
        step = self.open_next()
        self._next[step] = Operation.DISPATCH
        return step

    def send(self, step: int, operation: Operation, topk: int, dtype: int, parcel: Parcel) -> None:
        """Send this rank's rows of a phase; waits for nobody."""
        if self._bus.error is None:
            try:
                self._bus.post(Status(Kind.READY, step, operation, topk, dtype), parcel)
            except RuntimeError as error:
                if self._bus.error is None:  # the step's own failure, nothing is broken
                    raise
                raise self._why_broken() from error
        if self._bus.error is not None:
            raise self._why_broken()
        self._next[step] = Operation(operation + 1)

    def collect(self, step: int, operation: Operation) -> Delivery:
        """Wait until all ranks have sent this phase.

        Raises:
            MoEEpPeerError: a rank failed in this step, ended, left, or is in another call.
            MoEEpTimeoutError: a rank did not come.
            MoEEpTransportError: a collective failed.
        """
        wait = _Wait(f"rank {self._bus.rank} waits in {operation.name.lower()} of step {step}: ", self._timeout_s)
        try:
            while not isinstance(got := self._bus.take(step, operation), Delivery):
                if got is None:
                    raise self._why_broken()
                self._sit(wait, got)
            for flight in got.flights:
                while not self._sit(wait, flight):
                    pass
        finally:
            self.waited_s += wait.spent
        return got

    def close(self, step: int) -> None:
        self.end(step)
        self._next.pop(step, None)

    def fail(self, step: int, error: BaseException | str) -> None:
        """Give an open step up: peers that wait for what is left of it raise MoEEpPeerError. Waits for nobody."""
        if not self.is_open(step):
            return
        operation = self._next[step]
        self._bus.abandon(step)
        if operation in (Operation.DISPATCH, Operation.COMBINE) and not self._bus.has_failed(step):
            origin, reason = blame(error, self._bus.rank)
            with contextlib.suppress(RuntimeError):  # kept in bus.error: the group is broken, and all find out
                self._bus.post(Status(Kind.FAILED, step, operation, origin=origin, reason=reason))
        self.close(step)
        self._janitor.look()

    def fail_next(self, error: BaseException) -> None:
        """Give up the step that this rank was about to begin, for a mistake made before anything was sent."""
        if not self.blocked:
            self.fail(self.begin(), error)

    # Waiting.

    def _sit(self, wait: _Wait, flight: Flight) -> bool:
        """Wait for a collective, a little; whether it has ended."""
        start = time.perf_counter()
        try:
            ended = flight.wait(min(POLL_S, max(wait.limit - wait.spent, 0.001)))
        except RuntimeError as error:
            self._bus.error = self._bus.error or error
            raise self._why_broken() from error
        # A waiter that was itself stopped does not blame the time on its peers.
        wait.spent += min(time.perf_counter() - start, POLL_S)
        if ended:
            return True
        if wait.spent >= wait.next_look:
            self._look_around(wait)
        if wait.spent >= wait.limit:
            raise self._late(wait)
        return False

    def _look_around(self, wait: _Wait) -> None:
        wait.next_look = wait.spent + _LOOK_S
        if wait.told != self._bus.rounds:
            wait.told = self._bus.rounds
            self._presence.say_waiting(wait.told)
        gone = self._presence.find_gone(0.0)
        if LEFT in gone.values() and not self._all_have_come():
            gone = {peer: what for peer, what in gone.items() if what != LEFT}  # those may have told why before
        for peer, what in gone.items():
            if peer in wait.gone:  # seen twice: what it may have sent before that has come by now, if it comes
                told = " has left (destroyed its Fleet)" if what == LEFT else f": {what}; {_ADVICE}"
                raise MoEEpPeerError(f"{wait.where}rank {peer}{told}", rank=peer, reason=what)
        wait.gone = set(gone)

    def _all_have_come(self) -> bool:
        """Whether no rank is left for which the round may still wait, but those that are gone."""
        return all(known in (WAITS, LEFT, ENDED) for known in self._presence.others(self._bus.rounds).values())

    def _late(self, wait: _Wait) -> MoEEpTimeoutError:
        others = self._presence.others(self._bus.rounds)
        missing = [peer for peer, known in others.items() if known != WAITS]
        told = "; ".join(f"rank {peer}: {known or 'nothing is known'}" for peer, known in others.items())
        return MoEEpTimeoutError(
            f"{wait.where}nothing for {wait.limit:g} s (BootstrapConfig.timeout_s) from some rank of the group, "
            f"most likely of {missing or 'those reached last'}; {told}",
            ranks=missing,
        )

    def _why_broken(self) -> MoEEpError:
        """The error of all calls after a collective failed. A group that broke stays broken."""
        if self._broken is None:
            self._broken = self._what_broke_it(self._bus.error)
        return self._broken.with_traceback(None)

    def _what_broke_it(self, error: Exception | None) -> MoEEpError:
        text = str(error).split(". This is typically")[0]
        if isinstance(error, StrangerError):
            text += "; something else uses the process group, in another order on other ranks"
            return MoEEpTransportError("all_to_all_single", -1, text)
        if "timed out" in text.lower():
            others = self._presence.others(self._bus.rounds)
            missing = [peer for peer, known in others.items() if known != WAITS]
            text = f"the process group gave a collective up before BootstrapConfig.timeout_s was over: {text}"
            return MoEEpTimeoutError(f"{text}; make the group with a longer timeout", ranks=missing)
        if gone := self._presence.find_gone(_GONE_S):
            names = ", ".join(f"rank {peer}: {what}" for peer, what in gone.items())
            first = next(iter(gone))
            message = f"{names}; {_ADVICE} ({text})"
            return MoEEpPeerError(message, rank=first, reason=gone[first])
        unknown = "some rank of the group ended or cannot be reached, and torch does not say which"
        return MoEEpTransportError("all_to_all_single", -1, f"{unknown}: {_REBUILD} ({text})")


class _Wait:
    """How long one call has waited, in seconds of its own running time, and what it has looked at meanwhile."""

    def __init__(self, where: str, limit: float) -> None:
        self.where, self.limit, self.spent = where, limit, 0.0
        self.next_look, self.told = min(_LOOK_S, limit / 2), 0
        self.gone: set[int] = set()
