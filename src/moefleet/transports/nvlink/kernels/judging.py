"""Judging peers, with fault tolerance: whom a phase of a step counts, decided once and obeyed by every program.

A step and its round are one number, the round above the step (``ROUND_SHIFT``), so a flag of an older round satisfies
no wait of a newer one. Phases have numbers as well, ``2 * step`` for dispatch and one more for combine. ``left[p]`` is
the last phase that rank ``p`` counts in: FOREVER while it is trusted, 0 while it is masked, and the phase in which it
was accused from then on. It changes during a phase only to that phase, so all programs of a launch agree on who counts.

Usually every flag is there soon and nothing is decided. A program that waits longer checks in. Only once all have may
somebody be left out: whoever did not check in has seen every flag, and then the flag is there for all. One compare-and-
set on the phase's verdict ends it, and all that checked in obey. Program 0 alone keeps the time, looks for reasons, and
tells the peers that it waits (see ``waiting``). Ranks whose calls cross leave each other out of the phase and report
it; nobody is accused.

What programs branch on is the same for all their threads: results of atomics and of ``poll``, never of plain loads of
words that somebody may be changing.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from ..geometry import BOARD, CONTROL, ROUND_SHIFT
from .signals import CROSSED, FOREVER, flags, poll, release, report
from .waiting import (
    _ALONE,
    COMPILING_NS,
    PATIENCE,
    ROW_NS,
    SLICE_NS,
    board,
    both_calls,
    crossing_call,
    has,
    has_ended,
    part,
    said_compiling,
    said_waiting,
    say_phase,
    say_waiting,
)

_BUDGET = tl.constexpr(CONTROL.budget_ns)
_BASE = tl.constexpr(CONTROL.base)
_VERDICT = tl.constexpr(CONTROL.verdict)
_STUCK = tl.constexpr(CONTROL.stuck)
_LEFT = tl.constexpr(CONTROL.left)
_ROUND_NOW = tl.constexpr(BOARD.round)
_COMPILING = tl.constexpr(BOARD.compiling)
_ACCUSED = tl.constexpr(BOARD.accused)
_BEHIND = tl.constexpr(BOARD.behind)
_SHIFT = tl.constexpr(ROUND_SHIFT)
_STEP_BITS = tl.constexpr((1 << ROUND_SHIFT) - 1)
_ROUND, _STEP, _RANKS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)  # words of a header, see HEAD_WORDS

ABSENT = tl.constexpr(-2)
"""Rows of a rank that does not count; of one that failed in this step they are -1."""

NOT_SERVED = tl.constexpr(2)
"""Status of a combine header to a rank whose dispatch did not count here."""


@triton.jit
def numbered(step, ctl, TOLERANT: tl.constexpr):
    """A step's number with its round."""
    if TOLERANT:
        step += tl.load(ctl + _BASE)
    return step


@triton.jit
def left_of(ctl, RANK: tl.constexpr, W: tl.constexpr):
    """The last phase in which each peer counts, for ``counting``."""
    left = ()
    for j in tl.static_range(1, W):
        left = left + (tl.load(ctl + _LEFT + (RANK + j) % W),)
    return left


@triton.jit
def counting(left, step, phase: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Peers that count in a phase, as bits: neither masked nor accused before it."""
    ranks = tl.cast(0, tl.int64)
    for j in tl.static_range(1, W):
        ranks |= tl.where(left[j - 1] >= 2 * step + phase, tl.cast(1, tl.int64) << (RANK + j) % W, 0)
    return ranks


@triton.jit
def sign(head, step, ranks, RANK: tl.constexpr):
    """Write into a dispatch header where this rank stands: round, step, and whom it counts."""
    tl.store(head + _ROUND, (step >> _SHIFT).to(tl.int32))
    tl.store(head + _STEP, step.to(tl.int32))
    tl.store(head + _RANKS, (ranks | 1 << RANK).to(tl.int32))


@triton.jit
def hear(head, step, ranks, RANK: tl.constexpr):
    """Whether a header is of another round or step than this rank's, and whether its sender leaves out a rank that this
    one counts."""
    elsewhere = (tl.load(head + _ROUND) != (step >> _SHIFT).to(tl.int32)) | (tl.load(head + _STEP) != step.to(tl.int32))
    return elsewhere, ((ranks | 1 << RANK).to(tl.int32) & ~tl.load(head + _RANKS)) != 0


@triton.jit
def tell(counter, PROGRAMS: tl.constexpr, at, step, ranks, peers, RANK: tl.constexpr, W: tl.constexpr):
    """Store ``step`` to this rank's flag at byte ``at`` of all ``ranks``, once all ``PROGRAMS`` have come here."""
    tl.debug_barrier()
    finished = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if finished % PROGRAMS == PROGRAMS - 1:
        for j in tl.static_range(1, W):
            d = (RANK + j) % W
            if has(ranks, d):
                release(flags(tl.load(peers + d), at) + RANK, step)


@triton.jit
def condemn(p, step, phase: tl.constexpr, ctl):
    """Accuse rank ``p`` in this phase: it counts in no later one, and the host is told. The first time only."""
    phase_number = 2 * step + phase
    if tl.atomic_cas(ctl + _LEFT + p, tl.cast(FOREVER, tl.int64), phase_number) == FOREVER:
        release(board(ctl) + _ACCUSED + p, phase_number)


@triton.jit
def fall_behind(ctl):
    """Tell the host that the others know more than this rank."""
    release(board(ctl) + _BEHIND, tl.cast(1, tl.int64))


@triton.jit
def decide(flag, step, phase: tl.constexpr, ranks, missing, ctl, alarm, peers, pid, PROGRAMS: tl.constexpr,
           L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Those of ``ranks`` that count in this phase, as bits; ``flag`` is the first of their flags.

    ``PROGRAMS`` of this launch take part, and ``missing`` is what ``look_soon`` found.
    """
    present = ranks
    if _ALONE | (missing != 0):
        present = _judge(flag, step, phase, ranks, ctl, alarm, peers, pid, PROGRAMS, L, RANK, W)
    return present


@triton.jit
def _judge(flag, step, phase: tl.constexpr, ranks, ctl, alarm, peers, pid, PROGRAMS: tl.constexpr, L: tl.constexpr,
           RANK: tl.constexpr, W: tl.constexpr):  # fmt: skip
    verdict, stuck = ctl + _VERDICT + phase, ctl + _STUCK + 2 * phase + step % 2
    tag, mark = step & 0xFFFFFFFF, (step & _STEP_BITS) << 16
    tl.atomic_max(stuck, mark)
    tl.atomic_add(stuck, 1)
    budget = tl.load(ctl + _BUDGET)
    slice_ns = budget if _ALONE else budget - budget + SLICE_NS
    number, own, nobody = 2 * step + phase, tl.load(peers + RANK), tl.cast(0, tl.int64)
    accused, ahead, crossed, told, spent, prolonged, spared = nobody, nobody, nobody, nobody, nobody, nobody, nobody
    if pid == 0:
        say_phase(number, ranks, peers, L, RANK, W)
    decided = tl.atomic_add(verdict, 0)
    while (decided >> 32) & 0xFFFFFFFF != tag:
        awaited, missing = ranks & ~(accused | ahead), nobody
        for j in tl.static_range(1, W):
            p = (RANK + j) % W
            if has(awaited, p):
                missing |= poll(flag + p, step, tl.where(missing == 0, slice_ns, 0)).to(tl.int64) << p
        if missing == 0:
            mine = (tag << 32) | awaited
            found = tl.atomic_cas(verdict, decided, mine)
            decided = tl.where(found == decided, mine, found)
        elif pid == 0:
            patient, compiling = nobody, nobody
            may = (tl.atomic_add(stuck, 0) == mark + PROGRAMS) | _ALONE
            for j in tl.static_range(1, W):
                p = (RANK + j) % W
                if has(missing, p):
                    gone, later, waits, busy = _look(p, step, ctl, peers, L, RANK)
                    one = tl.cast(1, tl.int64) << p
                    if (poll(flag + p, step, 0) != 0) & may:  # what a dead peer had committed counts
                        over = _over(waits, busy, spent, prolonged, spared, budget)
                        accused |= tl.where((gone != 0) | ((later == 0) & over), one, 0)
                        ahead |= tl.where((gone == 0) & (later != 0), one, 0)
                        theirs = crossing_call(flag + p, step, number, p, own, peers, L, RANK)
                        if theirs != 0:
                            report(ctl, alarm, CROSSED, p, both_calls(number, theirs))
                            part(flag + p, step, number, p, missing, peers, L, RANK, W)
                            crossed |= one
                    patient |= tl.where(waits != 0, one, 0)
                    compiling |= tl.where(busy != 0, one, 0)
            ahead |= crossed & ~accused
            left = missing & ~(accused | ahead)
            if left != missing:
                spent = nobody  # whoever waited for those begins only now
            elif ((left & ~compiling) == 0) & (spared < COMPILING_NS):
                spared += slice_ns
            elif ((left & ~(patient | compiling)) == 0) & (prolonged < PATIENCE * budget):
                prolonged += slice_ns
            else:
                spent += slice_ns
            if left != told:
                say_waiting(left, peers, ranks, L, RANK, W)
                told = left
        if missing != 0:
            decided = tl.atomic_add(verdict, 0)
    if told != 0:
        say_waiting(nobody, peers, ranks, L, RANK, W)
    present = decided & 0xFFFFFFFF
    if pid == 0:
        if crossed == 0:
            say_phase(nobody, ranks, peers, L, RANK, W)
        for j in tl.static_range(1, W):
            p = (RANK + j) % W
            if has(accused & ~present, p):
                condemn(p, step, phase, ctl)
        if (ahead & ~present) != 0:
            fall_behind(ctl)
    return present


@triton.jit
def wait_for(flag, value, p, step, phase: tl.constexpr, ctl, peers, ranks, say, L: tl.constexpr, RANK: tl.constexpr,
             W: tl.constexpr):  # fmt: skip
    """Wait until a flag of rank ``p`` that only some programs need, such as a row's, holds ``value``. Returns 1 if it
    never does: the rank is then accused, or ahead of this one. ``say``: whether this program tells the peers that it
    waits."""
    late = poll(flag, value, ROW_NS)
    if late != 0:
        late = _insist(flag, value, p, step, phase, ctl, peers, ranks, say, L, RANK, W)
    return late


@triton.jit
def _insist(flag, value, p, step, phase: tl.constexpr, ctl, peers, ranks, say, L: tl.constexpr, RANK: tl.constexpr,
            W: tl.constexpr):  # fmt: skip
    budget = tl.load(ctl + _BUDGET)
    slice_ns = budget if _ALONE else budget - budget + SLICE_NS
    one, nobody = tl.cast(1, tl.int64) << p, tl.cast(0, tl.int64)
    if say:
        say_waiting(one, peers, ranks, L, RANK, W)
    spent, prolonged, spared, late, over = nobody, nobody, nobody, 1, False
    while (late != 0) & (over == 0):
        gone, later, waits, busy = _look(p, step, ctl, peers, L, RANK)
        late = poll(flag, value, slice_ns)
        over = (gone != 0) | (later != 0) | _over(waits, busy, spent, prolonged, spared, budget)
        if (late != 0) & over:
            if (gone != 0) | (later == 0):
                condemn(p, step, phase, ctl)
            else:
                fall_behind(ctl)
        if (busy != 0) & (spared < COMPILING_NS):
            spared += slice_ns
        elif (waits != 0) & (prolonged < PATIENCE * budget):
            prolonged += slice_ns
        else:
            spent += slice_ns
    if say:
        say_waiting(nobody, peers, ranks, L, RANK, W)
    return late


@triton.jit
def _over(waits, busy, spent, prolonged, spared, budget):
    """Whether the time is up for a peer that says, or does not, that it waits for somebody else or compiles."""
    patience = ((waits == 0) | (prolonged >= PATIENCE * budget)) & ((busy == 0) | (spared >= COMPILING_NS))
    return (spent >= budget) & patience


@triton.jit
def _look(p, step, ctl, peers, L: tl.constexpr, RANK: tl.constexpr):
    """Whether rank ``p`` is gone or was accused before; is in a later round; says that it waits for somebody else; says
    that it compiles."""
    mine = tl.load(peers + RANK)
    gone = has_ended(p, ctl) | (tl.atomic_add(ctl + _LEFT + p, 0) != FOREVER)
    later = poll(flags(mine, L.round_of) + p, (step >> _SHIFT) + 1, 0) == 0
    waits, busy = said_waiting(p, mine, L), said_compiling(p, mine, L)
    return gone.to(tl.int32), later.to(tl.int32), waits.to(tl.int32), busy.to(tl.int32)


@triton.jit
def announce(peers, ctl, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Tell all peers what the board says: the round that this rank is in, so that whoever waits for it in a step of an
    earlier one stops waiting; and whether it compiles, so that whoever waits for it is patient."""
    round_, compiling = tl.load(board(ctl) + _ROUND_NOW), tl.load(board(ctl) + _COMPILING)
    for j in tl.static_range(1, W):
        there = tl.load(peers + (RANK + j) % W)
        release(flags(there, L.round_of) + RANK, round_)
        release(flags(there, L.compiling) + RANK, compiling)
