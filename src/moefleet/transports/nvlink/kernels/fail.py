"""Giving up: one step, in which this rank takes part without rows, or all steps from here on.

So peers stop waiting at once, and after a failed step all ranks count on alike. One program. In a step it sets the
flags that peers wait for, without what should stand beside them. With fault tolerance it then waits for them, which
makes it safe to use the same buffer set again; without, whatever comes next into that set does.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from ..geometry import CONTROL, NOTE_STEP, NOTE_WORDS, NOTES
from .judging import counting, left_of, numbered, sign, wait_for
from .signals import FOREVER, enter, flags, owe, release, words
from .waiting import COMBINE, DISPATCH, are_through, has

_LAUNCHES = tl.constexpr(CONTROL.launches)
_OWED = tl.constexpr(CONTROL.owed)
_NOTES, _NOTE_WORDS, _NOTE_STEP = tl.constexpr(NOTES), tl.constexpr(NOTE_WORDS), tl.constexpr(NOTE_STEP)


@triton.jit
def fail(note, slot, peers, ctl, alarm, L: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
         PROGRAMS: tl.constexpr, EARLY: tl.constexpr, FRESH: tl.constexpr, WAIT: tl.constexpr,
         TOLERANT: tl.constexpr):  # fmt: skip
    """Give up the step that ``slot`` has dispatched, or (``FRESH``) the next one before anything was sent. ``note``
    says why."""
    enter(EARLY)
    if FRESH:
        step = (tl.atomic_add(ctl + _LAUNCHES, PROGRAMS, sem="relaxed", scope="gpu") // PROGRAMS) + 1
        step = numbered(step, ctl, TOLERANT)
    else:
        step = tl.load((slot + S.step).to(tl.pointer_type(tl.int64)))
    to_set = (step % 2) * L.set_bytes
    mine = tl.load(peers + RANK) + to_set
    ranks = counting(left_of(ctl, RANK, W), step, DISPATCH, RANK, W) if TOLERANT else -1
    heard = TOLERANT or not WAIT or are_through(tl.load(ctl + _OWED + step % 2), mine, L, RANK, W)
    at = tl.arange(0, _NOTE_WORDS)
    place = step // 2 % _NOTES * W + RANK
    said = tl.where(at == _NOTE_STEP, step, tl.load(note + at))
    for j in tl.static_range(1, W):
        if has(ranks, (RANK + j) % W):
            there = tl.load(peers + (RANK + j) % W) + to_set
            tl.store(flags(there, L.note) + place * _NOTE_WORDS + at, said, mask=heard)
            if FRESH:
                if TOLERANT:
                    head = words(there, L.head) + RANK * L.head_words
                    tl.store(head + 3, 1)
                    sign(head, step, ranks, RANK)
                release(flags(there, L.head_flag) + RANK, step)
            release(flags(there, L.done_flag) + RANK, step)
            release(flags(there, L.read_flag) + RANK, step)
            release(flags(there, L.comb_flag) + RANK, step)
    if not TOLERANT:
        owe(ctl, step, True)
    elif WAIT:
        for j in tl.static_range(1, W):
            peer = (RANK + j) % W
            head_flag, comb_flag = flags(mine, L.head_flag) + peer, flags(mine, L.comb_flag) + peer
            if has(ranks, peer):
                late = wait_for(head_flag, step, peer, step, DISPATCH, ctl, peers, ranks, True, L, RANK, W)
                if late == 0:
                    wait_for(comb_flag, step, peer, step, COMBINE, ctl, peers, ranks, True, L, RANK, W)


@triton.jit
def depart(peers, ctl, L: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr, PROGRAMS: tl.constexpr,
           EARLY: tl.constexpr, TOLERANT: tl.constexpr):  # fmt: skip
    """Say that this rank takes part in no further step. What it sent before stays as it is."""
    enter(EARLY)
    first = numbered(tl.load(ctl + _LAUNCHES) // PROGRAMS + 1, ctl, TOLERANT)
    for j in tl.static_range(1, W):
        for parity in tl.static_range(2):
            there = tl.load(peers + (RANK + j) % W) + parity * L.set_bytes
            tl.store(flags(there, L.gone) + RANK, first)
            release(flags(there, L.head_flag) + RANK, tl.cast(FOREVER, tl.int64))
            release(flags(there, L.done_flag) + RANK, tl.cast(FOREVER, tl.int64))
            release(flags(there, L.read_flag) + RANK, tl.cast(FOREVER, tl.int64))
            release(flags(there, L.comb_flag) + RANK, tl.cast(FOREVER, tl.int64))
