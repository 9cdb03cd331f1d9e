"""Long waits: what ranks tell each other while they wait, and calls that cross.

Usually a flag is there within 30 us and nothing of this runs. A wait that lasts longer is told to the peers: that this
rank waits for somebody else than them, so that they are patient with it, and the phase in which it waits for them. Two
ranks that wait for one another in different phases make their calls in different orders: neither would ever send what
the other one waits for. Both leave then, at once, with both calls in their error word.

Phases are numbered, ``2 * step`` for dispatch and one more for combine. Where a wait has failed, this rank sends
nothing but "failed" in all later phases, and waits no longer, until its host was told (``Engine.clear_alarm``). So what
a rank that comes late still reads is not written over by steps that were launched meanwhile, and both go on at the same
step; what comes first into a buffer set after that waits until the peers are through with it (``owed``).

What programs branch on is the same for all their threads: results of atomics and of ``poll``, never of plain loads of
words that somebody may be changing.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from ..geometry import BOARD, CONTROL, MOST_JUDGED, ROUND_SHIFT
from .signals import CROSSED, INTERPRETED, PEER_ENDED, TIMEOUT_DISPATCH, flags, poll, release, report, spoil

_BUDGET = tl.constexpr(CONTROL.budget_ns)
_BOARD = tl.constexpr(CONTROL.board)
_DEAD = tl.constexpr(BOARD.dead)
_MOST_JUDGED = tl.constexpr(MOST_JUDGED)
_ROUND = tl.constexpr(ROUND_SHIFT + 1)
_ALONE = tl.constexpr(INTERPRETED)  # programs run one after the other, and what is not there never comes

DISPATCH = tl.constexpr(0)
COMBINE = tl.constexpr(1)

SOON_NS = tl.constexpr(30_000)
"""How long a program waits before it does anything about it."""

ROW_NS = tl.constexpr(1_000_000)
"""The same for a row's flag. With many rows a wait of 100 us is no long one, and where all programs at once ask host
memory who has ended, the answers take milliseconds."""

SLICE_NS = tl.constexpr(50_000)
"""Between two looks at more than the flag, and all that one counts towards the budget: a program that was itself held
up, by another process on its GPU, does not blame the time on its peers."""

PATIENCE = tl.constexpr(3)
"""Budgets for which a wait is prolonged while the peer says that it waits for somebody else."""

COMPILING_NS = tl.constexpr(120_000_000_000)
"""How long a wait is prolonged while the peer says that it compiles a kernel."""

NOTE_NS = tl.constexpr(200_000_000)
"""How long a rank that gives a step up waits for peers that may not have read yet why it gave up an earlier one."""

PARTING_NS = tl.constexpr(1_000_000_000)
"""How long a rank that has seen that calls cross waits for the other one to see it."""


@triton.jit
def has(ranks, p):
    """Whether rank ``p`` is among these."""
    return ((ranks >> p) & 1) != 0


@triton.jit
def look_soon(flag, value, ranks, p: tl.constexpr):
    """Wait a little for the flag of rank ``p``, if it is among ``ranks``. Its bit if it is missing."""
    late = tl.cast(0, tl.int32)
    if has(ranks, p):
        late = poll(flag, value, SOON_NS)
    return late.to(tl.int64) << p


@triton.jit
def await_flags(flag, value, step, phase: tl.constexpr, missing, ctl, alarm, peers, say, L: tl.constexpr,
                RANK: tl.constexpr, W: tl.constexpr, SENDING: tl.constexpr = False):  # fmt: skip
    """Wait for the flags of ``missing``, which ``look_soon`` did not find, to hold ``value``; ``flag`` is rank 0's.

    Returns those that never came. One of them is then reported, and later phases are spoilt.

    ``say``: whether this program looks at what the peers say, one of a launch. ``SENDING``: whether the wait is for
    room to send to, which peers make without this rank, so that nothing is said to them.
    """
    if missing != 0:
        missing = _insist(flag, value, step, phase, missing, ctl, alarm, peers, say, L, RANK, W, SENDING)
    return missing


@triton.jit
def await_row(flag, step, phase: tl.constexpr, ctl, alarm, p):
    """Wait for a row's flag of rank ``p``, which has begun to send. Returns 1 if it never came, as ``await_flags``.

    Nothing is looked at or told meanwhile.
    """
    late = poll(flag, step, tl.load(ctl + _BUDGET))
    if late != 0:
        report(ctl, alarm, TIMEOUT_DISPATCH + phase, p, step)
        spoil(ctl, step, phase)
    return late


@triton.jit
def await_owed(owed, mine, step, ctl, alarm, peers, say, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Wait until the peers are through with step ``owed``, if there is one, before anything is sent into its set."""
    late = tl.cast(0, tl.int64)
    if owed > 0:
        comb_flag = flags(mine, L.comb_flag)
        for j in tl.static_range(1, W):
            late |= look_soon(comb_flag + (RANK + j) % W, owed, -1, (RANK + j) % W)
        late = await_flags(comb_flag, owed, step, DISPATCH, late, ctl, alarm, peers, say, L, RANK, W, True)
    return late


@triton.jit
def _insist(flag, value, step, phase: tl.constexpr, missing, ctl, alarm, peers, say, L: tl.constexpr,
            RANK: tl.constexpr, W: tl.constexpr, SENDING: tl.constexpr):  # fmt: skip
    number, nobody = 2 * step + phase, tl.cast(0, tl.int64)
    mine = tl.load(peers + RANK)
    budget = tl.atomic_add(ctl + _BUDGET, 0)
    slice_ns = budget if _ALONE else budget - budget + SLICE_NS
    no_rank = tl.cast(-1, tl.int32)
    told, first, ended, crossing, call = missing, no_rank, no_rank, no_rank, nobody
    spent, prolonged, spared, over = nobody, nobody, nobody, False
    if say and not SENDING:
        say_phase(number, told, peers, L, RANK, W)
        say_waiting(told, peers, -1, L, RANK, W)
    while (missing != 0) & (over == 0):
        patient, compiling, still, first = nobody, nobody, nobody, no_rank
        for j in tl.static_range(1, W):
            p = (RANK + j) % W
            if has(missing, p):
                late = poll(flag + p, value, tl.where(still == 0, slice_ns, 0))
                if late != 0:
                    one = tl.cast(1, tl.int64) << p
                    first = tl.where(first < 0, p, first)
                    still |= one
                    patient |= tl.where(said_waiting(p, mine, L), one, 0)
                    compiling |= tl.where(said_compiling(p, mine, L), one, 0)
                    if say:
                        if has_ended(p, ctl):  # what it had sent counts
                            ended = tl.where(poll(flag + p, value, 0) != 0, p, ended)
                        theirs = crossing_call(flag + p, value, number, p, mine, peers, L, RANK)
                        crossing = tl.where(theirs != 0, p, crossing)
                        call = tl.where(theirs != 0, theirs, call)
        missing = still
        if ((missing & ~compiling) == 0) & (spared < COMPILING_NS):
            spared += slice_ns
        elif ((missing & ~(patient | compiling)) == 0) & (prolonged < PATIENCE * budget):
            prolonged += slice_ns
        else:
            spent += slice_ns
        budget = tl.atomic_add(ctl + _BUDGET, 0)
        over = (spent >= budget) | (crossing >= 0) | (ended >= 0)
    if missing != 0:
        if crossing >= 0:
            report(ctl, alarm, CROSSED, crossing, both_calls(number, call))
            part(flag + crossing, value, number, crossing, missing, peers, L, RANK, W)
        elif ended >= 0:
            report(ctl, alarm, PEER_ENDED, ended, step)
        else:
            report(ctl, alarm, TIMEOUT_DISPATCH + phase, first, step)
        spoil(ctl, step, phase)
    if say and not SENDING:
        say_waiting(nobody, peers, -1, L, RANK, W)
        if crossing < 0:
            say_phase(nobody, told, peers, L, RANK, W)
    return missing


@triton.jit
def crossing_call(flag, value, number, p, mine, peers, L: tl.constexpr, RANK: tl.constexpr):
    """The phase in which rank ``p`` waits for this rank, if that is another than ``number``, where this rank waits for
    ``flag`` of ``p``, and neither has sent what the other one waits for; else 0.

    What ``p`` sent it sent before it began to wait, so a flag that is looked at after its word is there if it was sent.
    """
    call = tl.abs(_said(flags(mine, L.awaits) + p))
    crossed = False
    if (call != 0) & (call != number) & (call >> _ROUND == number >> _ROUND):
        step, combine = call // 2, call % 2
        there = tl.load(peers + p) + step % 2 * L.set_bytes + tl.where(combine != 0, L.comb_flag, L.head_flag)
        unsent = poll(flags(there, 0) + RANK, step, 0) != 0
        crossed = unsent & (poll(flag, value, 0) != 0)
    return tl.where(crossed, call, 0)


@triton.jit
def _said(word):
    """A word that another GPU writes."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def both_calls(number, call):
    """This rank's phase and the other one's as one number, see ``Trouble``."""
    return ((number & 0x7FFFFFFFF) << 4) | ((call - number + 8) & 15)


@triton.jit
def part(flag, value, number, p, missing, peers, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Say that this rank has seen that calls cross, and wait a little until rank ``p`` has seen it too: what is sent
    next could end its wait before it looks."""
    say_phase(-number, missing, peers, L, RANK, W)
    words = flags(tl.load(peers + RANK), L.awaits)
    spent, theirs = tl.cast(0, tl.int64), _said(words + p)
    while (theirs > 0) & (spent < PARTING_NS):
        poll(flag, value, tl.cast(SLICE_NS, tl.int64))
        spent += PARTING_NS if _ALONE else SLICE_NS
        theirs = _said(words + p)


@triton.jit
def say_phase(number, missing, peers, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Tell those that are missing in which phase this rank waits for them; 0: in none."""
    for j in tl.static_range(1, W):
        d = (RANK + j) % W
        if has(missing, d):
            release(flags(tl.load(peers + d), L.awaits) + RANK, number)


@triton.jit
def say_waiting(missing, peers, ranks, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Tell each of ``ranks`` whether this rank waits for somebody else than it."""
    for j in tl.static_range(1, W):
        d = (RANK + j) % W
        if has(ranks, d):
            others = (missing & ~(tl.cast(1, tl.int64) << d)) != 0
            release(flags(tl.load(peers + d), L.waiting) + RANK, others.to(tl.int64))


@triton.jit
def has_ended(p, ctl):
    """Whether the host knows that the process of rank ``p`` has ended, or has left: of ranks that the board has room
    for."""
    at = tl.minimum(p, _MOST_JUDGED - 1)
    return (poll(board(ctl) + _DEAD + at, tl.cast(1, tl.int64), 0) == 0) & (p < _MOST_JUDGED)


@triton.jit
def board(ctl):
    """Words in pinned host memory: deaths, which the host writes, and accusations, which it reads."""
    return tl.load(ctl + _BOARD).to(tl.pointer_type(tl.int64))


@triton.jit
def are_through(owed, mine, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr):
    """Whether the peers are through with step ``owed``, or are so after a moment. Nothing depends on it but a note."""
    late = tl.cast(0, tl.int32)
    if owed > 0:
        for j in tl.static_range(1, W):
            late |= poll(flags(mine, L.comb_flag) + (RANK + j) % W, owed, tl.where(late == 0, NOTE_NS, 0))
    return late == 0


@triton.jit
def said_waiting(p, mine, L: tl.constexpr):
    """Whether rank ``p`` says that it waits for somebody else."""
    return poll(flags(mine, L.waiting) + p, tl.cast(1, tl.int64), 0) == 0


@triton.jit
def said_compiling(p, mine, L: tl.constexpr):
    """Whether rank ``p`` says that it compiles."""
    return poll(flags(mine, L.compiling) + p, tl.cast(1, tl.int64), 0) == 0
