"""One round: start ranks, do harm, see them agree, bring them back, and hold everything that they report together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from torch.distributed import TCPStore

from ..launch.nursery import Nursery
from ..launch.pool import host_store
from .crew import Crew, Event, Member
from .plan import Fault, Kind, Plan, Recovery
from .report import Moment, RoundReport

AHEAD = 30  # steps granted past the fault
AFTERWARDS = 6  # steps that must run degraded, and at full strength
HANG_S = 60.0
READMIT_S = 20.0
SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.TERM: signal.SIGTERM, Kind.STOP: signal.SIGSTOP}


class Hang(Exception):
    """Ranks did not come to rest in time."""


class Supervisor:
    """Keeps one round together: what an engine's control plane does, and the eye that finds mistakes.

    Args:
        watch: called after every event with the round so far.
    """

    def __init__(
        self, nursery: Nursery, store: TCPStore, prefix: str, plan: Plan, watch: Callable[[Supervisor], None]
    ) -> None:
        self.plan, self.report = plan, RoundReport(str(plan))
        self.report.fault = " + ".join(
            fault.kind.value + " while deciding" * fault.while_deciding for fault in plan.faults
        )  # fmt: skip
        spec = {
            "port": store.port, "prefix": prefix, "seed": plan.seed, "layout": plan.layout.value,
            "transport": plan.transport, "timeout_ms": plan.timeout_ms, "gather_s": plan.gather_s,
            "readmit_s": READMIT_S,
        }  # fmt: skip
        self.crew = Crew(nursery, spec, self._see)
        self._watch = watch
        self._pending: list[tuple[float, Fault]] = []
        self._waiting = list(plan.faults)
        self._resume_at: list[tuple[float, Member]] = []
        self._hit: set[int] = set()
        self._began = time.monotonic()
        self.fault_at: float | None = None
        self._round_open: dict[int, int] = {}
        self._masks: dict[tuple[str, int, int], list[int]] = {}
        self._seen: dict[str, dict[int, float]] = {}
        self.generation, self.world = 0, plan.world
        self._leaving = False
        self._full_from: tuple[int, int] | None = None

    # The round.

    def run(self) -> RoundReport:
        """All of it, from the first process to the last one's end."""
        try:
            for rank in range(self.world):
                self.crew.start(rank, self.world, 0)
            self._until(self._at_rest)
            self._run_to(self.plan.at_step + AHEAD)
            if self.plan.faults:
                self._until(lambda: not self._waiting and not self._pending)
                self._run_degraded()
                self._readmit()
                self._make_good()
            self._full_strength()
            self._leaving = True
            for member in self.crew.present():
                if member.segments != self.world:
                    self.report.leaked.append(f"rank {member.rank} maps {member.segments} segments of {self.world}")
                member.order("quit")
        except Hang as hang:
            self.report.hangs.append(str(hang))
        stubborn, leaked = self.crew.end(0.0 if self.report.hangs else 10.0)
        if stubborn and not self.report.hangs:
            self.report.hangs.append(f"{stubborn} processes did not end when told to")
        if leaked:
            self.report.leaked.append(f"{leaked} processes outlived SIGKILL")
        self.report.seconds = time.monotonic() - self._began
        self.report.timeline.sort(key=lambda moment: moment.at_s)
        return self.report

    def _run_to(self, step: int) -> None:
        for member in self.crew.present():
            if member.idle and not member.evicted:
                member.order("run", until=step)
        self._until(self._at_rest)

    def _run_degraded(self) -> None:
        """Steps until the decision that accounts for the faults, and some more."""
        for _ in range(4):
            before = {member.epoch for member in self.crew.present() if not member.evicted}
            self._run_to(self._highest_step() + AFTERWARDS)
            if {member.epoch for member in self.crew.present() if not member.evicted} == before:
                return

    def _readmit(self) -> None:
        """Continue who is stopped, and take everybody back who lives and was given up on."""
        self._continue_stopped()
        self._until(self._at_rest)
        for _ in range(3):
            if not any(member.evicted for member in self.crew.present()):
                return
            for member in self.crew.present():
                member.order("readmit")
            self._until(self._at_rest)
            self._run_to(self._highest_step() + 1)

    def _continue_stopped(self) -> None:
        for member in self.crew.members:
            if member.stopped:
                self._say(f"rank {member.rank} continued", "continued", member.rank)
                member.signal(signal.SIGCONT)

    def _make_good(self) -> None:
        """Replace the ranks that ended, or go on without them, as the plan says."""
        lost = sorted({m.rank for m in self.crew.members} - {m.rank for m in self.crew.present()})
        if not lost or self.plan.recovery is Recovery.NONE:
            return
        staying = sorted(self.crew.present(), key=lambda member: member.rank)
        self.generation += 1
        if self.plan.recovery is Recovery.REPLACE:
            self._say(f"ranks {lost} are replaced", "topology")
            for member in staying:
                member.order("topology", world=self.world, rank=member.rank)
            for rank in lost:
                self.crew.start(rank, self.world, self.generation)
        else:
            self.world -= len(lost)
            self._say(f"the Fleet shrinks to {self.world} ranks", "topology")
            for rank, member in enumerate(staying):
                member.order("topology", world=self.world, rank=rank)
                member.rank = rank
        self._until(self._at_rest)

    def _full_strength(self) -> None:
        here = list(self.crew.present())
        if len(here) == self.world:
            self._full_from = (self.generation, self._highest_step() + 1)
        self._run_degraded() if self.plan.recovery is Recovery.NONE else self._run_to(
            self._highest_step() + AFTERWARDS
        )  # fmt: skip

    def _highest_step(self) -> int:
        return max((m.step for m in self.crew.present() if m.generation == self.generation), default=0)

    # Waiting.

    def _at_rest(self) -> bool:
        """Whether everybody who can act waits for orders. Who missed a round is sent to it first."""
        rest = True
        for member in self.crew.present():
            if not member.idle:
                rest = False
            elif not member.evicted and self._round_open.get(member.generation, 0) > member.epoch:
                member.order("reconcile")
                rest = False
        return rest and not self._pending and not self._resume_at

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise Hang("waiting for " + ", ".join(str(m.rank) for m in self.crew.present() if not m.idle))
            self._strike(now)
            soonest = min((at for at, _ in (*self._pending, *self._resume_at)), default=now + 0.02)
            self.crew.poll(min(0.02, soonest - now))
            self._watch(self)

    # Harm.

    def _trigger(self, while_deciding: bool) -> None:
        """What was waiting for this goes off, each after its delay."""
        now = time.monotonic()
        due = [fault for fault in self._waiting if fault.while_deciding == while_deciding]
        if while_deciding and self.fault_at is None:
            return
        for fault in due:
            self._waiting.remove(fault)
            self._pending.append((now + fault.delay_s, fault))

    def _strike(self, now: float) -> None:
        for at, fault in list(self._pending):
            if at <= now:
                self._pending.remove((at, fault))
                self._hit_one(fault)
        for at, member in list(self._resume_at):
            if at <= now:
                self._resume_at.remove((at, member))
                member.signal(signal.SIGCONT)
                self._say(f"rank {member.rank} continued", "continued", member.rank)

    def _hit_one(self, fault: Fault) -> None:
        victim = self.crew.at(fault.rank)
        self._hit.add(fault.rank)
        now = time.monotonic()
        victim.signal(SIGNALS[fault.kind])
        if self.fault_at is None:
            self.fault_at = now
        self._say(f"{SIGNALS[fault.kind].name} to rank {fault.rank}", "fault", fault.rank, now)
        if fault.seconds is not None:
            self._resume_at.append((now + fault.seconds, victim))

    # What ranks report.

    def _see(self, event: Event) -> None:
        kind, rank, at = event["kind"], event["rank"], event["t"]
        match kind:
            case "step":
                self._see_step(event)
            case "entered":
                generation = event["generation"]
                self._round_open[generation] = max(self._round_open.get(generation, 0), event["round"])
                if self.fault_at is not None and rank not in self._hit:
                    self._trigger(while_deciding=True)
            case "flagged":
                self._first("flag", rank, at, f"rank {rank} flags step {event['step']}")
            case "agreed":
                self._same("mask", event, event["epoch"])
                self._first("mask", rank, at, f"rank {rank} adopts {event['mask']}, decision {event['epoch']}")
            case "readmitted":
                self._same("mask", event, event["epoch"])
                self._say(f"rank {rank} is back under {event['mask']}", "readmitted", rank, at)
            case "evicted":
                if rank not in self._hit:
                    self.report.evicted_healthy += 1
                self._say(f"rank {rank} learns that it was evicted", "evicted", rank, at)
            case "moved":
                self._say(f"rank {rank} is in the new topology of {event['world']} ranks", "moved", rank, at)
            case "no quorum":
                self.report.no_quorum += 1
                self._first("no quorum", rank, at, f"rank {rank} finds no quorum")
                self._continue_stopped()  # what the error asks for: bring ranks back
            case "error":
                self.report.errors.append(f"rank {rank}: {event['error']}")
            case "gone":
                if rank not in self._hit and not self._leaving:
                    self.report.errors.append(f"rank {rank} ended")

    def _see_step(self, event: Event) -> None:
        rank, step, report = event["rank"], event["step"], self.report
        if step >= self.plan.at_step and self._waiting:
            self._trigger(while_deciding=False)
        self._same("step", event, step)
        report.steps += 1
        report.rows += event["rows"]
        if event["wrong"]:
            report.wrong += event["wrong"]
            text = f"rank {rank} delivered {event['wrong']} WRONG rows in step {step}"
            self._say(text, "wrong", rank, event["t"])
        full = all(event["mask"])
        if self.fault_at is None or event["t"] < self.fault_at:
            return
        if not full:
            self._first("degraded", rank, event["t"], f"rank {rank} verifies degraded step {step}")
        elif self._full_from is not None and (event["generation"], step) >= self._full_from:
            self._first("full", rank, event["t"], f"rank {rank} verifies step {step} at full strength")

    def _same(self, what: str, event: Event, number: int) -> None:
        """All ranks hold one mask for each epoch and each delivered step."""
        key = (what, event["generation"], number)
        known = self._masks.setdefault(key, event["mask"])
        if known != event["mask"]:
            text = f"rank {event['rank']} holds {event['mask']} for {what} {number}, another {known}"
            self.report.disagreements.append(text)

    def _first(self, what: str, rank: int, at: float, text: str) -> None:
        """A rank's first event of a kind after the fault is a moment of the timeline, and an end of a duration."""
        seen = self._seen.setdefault(what, {})
        if rank in seen or self.fault_at is None or at < self.fault_at or (rank in self._hit and what != "full"):
            return
        seen[rank] = at
        self._say(text, what, rank, at)
        first, last = min(seen.values()) - self.fault_at, max(seen.values()) - self.fault_at
        report = self.report
        match what:
            case "flag":
                report.first_flag_s, report.last_flag_s = first, last
            case "mask":
                report.agreed_s = last
            case "degraded":
                report.degraded_s = last
            case "full":
                report.recovered_s = last

    def _say(self, text: str, kind: str, rank: int = -1, at: float | None = None) -> None:
        at = time.monotonic() if at is None else at
        self.report.timeline.append(Moment(at - (self.fault_at or self._began), text, kind, rank))


def run_round(
    nursery: Nursery, store: TCPStore, prefix: str, plan: Plan, watch: Callable[[Supervisor], None] = lambda _: None
) -> RoundReport:
    """Run one round on ranks that the nursery forks, which agree through ``store`` under ``prefix``."""
    return Supervisor(nursery, store, prefix, plan, watch).run()


def new_store() -> TCPStore:
    """A store that outlives every rank."""
    return host_store()
