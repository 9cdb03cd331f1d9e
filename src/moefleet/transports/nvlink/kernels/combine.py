"""Combine: a rank sums its experts' rows for each token that it served and pushes one row home, where they add up.

Sums are float32 and in a fixed order: slots in order on the serving rank, then ranks in order at home. A rank's
partial sum is rounded once to the row type, its own like all others. One launch.

Every program sends before it waits for rows, and waits only for peers. Where combine's rows come into the memory that
dispatch used (HIGH_THROUGHPUT), a sender first waits until home has unpacked its dispatch.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from ..geometry import CONTROL
from .counting import add_each, begin_ns
from .dispatch import EXPERT_MAJOR, RANK_MAJOR
from .judging import (
    ABSENT,
    NOT_SERVED,
    condemn,
    counting,
    decide,
    fall_behind,
    left_of,
    tell,
    wait_for,
)
from .signals import (
    MISMATCH,
    PEER_FAILED,
    PEER_GONE,
    enter,
    flags,
    has_gone,
    owe,
    release,
    report,
    spoilt,
    standing,
    unlike,
    words,
)
from .waiting import COMBINE, DISPATCH, await_flags, await_row, has, look_soon

_READ = tl.constexpr(CONTROL.read)
_LOST = tl.constexpr(CONTROL.lost)
_CAME_BACK = tl.constexpr(CONTROL.came_back)


@triton.jit(do_not_specialize=["T"])
def combine(
    rows, out, slot, peers, firsts, ctl, alarm, T,
    L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, SENDERS: tl.constexpr, EARLY: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    STAGED: tl.constexpr, COUNTS: tl.constexpr, TOLERANT: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Combine the experts' ``rows`` into ``out [T, H]``; both contiguous.

    ``STAGED``, ``TOLERANT``: as in dispatch. ``COUNTS``: where to count, or None. ``RENORMALIZE``: whether tokens that
    lost experts are scaled up.
    """
    enter(EARLY)
    pid = tl.program_id(0)
    step = tl.load((slot + S.step).to(tl.pointer_type(tl.int64)))
    parity = step % 2
    to_set = parity * L.set_bytes
    ranks = counting(left_of(ctl, RANK, W), step, COMBINE, RANK, W) if TOLERANT else -1
    if SEND:  # noqa: SIM102 - one condition is a constant
        if pid < SENDERS:
            _send(pid, rows, slot, peers, to_set, step, ranks, ctl, alarm, L, S, LAYOUT, RANK, W, M, H, K, CAP, BLOCK,
                  SENDERS, STAGED, TOLERANT)  # fmt: skip
    if RECEIVE:
        FIRST: tl.constexpr = SENDERS if SENDERS < PROGRAMS else 0
        if pid >= FIRST:
            mine = tl.load(peers + RANK) + to_set
            _receive(pid - FIRST, rows, out, slot, mine, peers, firsts, ctl, alarm, step, ranks, T, L, S, LAYOUT,
                     RANK, W, M, H, K, CAP, BLOCK, PROGRAMS - FIRST, STAGED, COUNTS, TOLERANT,
                     RENORMALIZE)  # fmt: skip
            if L.rows == L.back:  # the next dispatch's rows come into the same memory
                tell(ctl + _READ, PROGRAMS - FIRST, to_set + L.read_flag, step, ranks, peers, RANK, W)


@triton.jit
def _send(pid, rows, slot, peers, to_set, step, ranks, ctl, alarm, L: tl.constexpr, S: tl.constexpr,
          LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
          CAP: tl.constexpr, BLOCK: tl.constexpr, SENDERS: tl.constexpr, STAGED: tl.constexpr,
          TOLERANT: tl.constexpr):  # fmt: skip
    FIRST: tl.constexpr = 0 if STAGED else 1
    failed = step < 0
    done_flag, missing = flags(tl.load(peers + RANK) + to_set, L.done_flag), tl.cast(0, tl.int64)
    if not TOLERANT:
        failed = spoilt(standing(ctl)[0], step, COMBINE) | (tl.load(ctl + _LOST + step % 2) == step)
    most = tl.load(slot + S.got + RANK) if STAGED else 0
    if (pid == 0) & (failed == 0):
        tl.store(ctl + _CAME_BACK + step % 2, step)
    # Who was left out since dispatch is told so.
    sent_to = counting(left_of(ctl, RANK, W), step, DISPATCH, RANK, W) if TOLERANT else -1
    for j in tl.static_range(1, W):
        home = (RANK + j) % W
        got = tl.load(slot + S.got + home)
        most = tl.maximum(most, got)
        if (pid == (j - 1) % SENDERS) & has(sent_to, home):
            there = tl.load(peers + home) + to_set
            status = (got < 0).to(tl.int32)
            if TOLERANT:
                status = tl.where((got == ABSENT) | (has(ranks, home) == 0), NOT_SERVED, status)
            if failed == 0:
                tl.store(words(there, L.comb_status) + RANK, status + (_code(rows) << 8) + _tag(step))
            release(flags(there, L.comb_flag) + RANK, step)
        if L.rows == L.back:
            if TOLERANT:
                if has(ranks, home) & (got > 0):
                    late = wait_for(done_flag + home, step, home, step, COMBINE, ctl, peers, ranks, pid == 0, L, RANK,
                                    W)  # fmt: skip
                    ranks &= ~(late.to(tl.int64) << home)
            else:
                missing |= look_soon(done_flag + home, step, tl.where(failed, 0, -1).to(tl.int64), home)
    if L.rows == L.back and not TOLERANT:
        lost = await_flags(done_flag, step, step, COMBINE, missing, ctl, alarm, peers, pid == 0, L, RANK, W, True)
        failed |= lost != 0
    most = tl.where(failed, 0, most)
    for row in range((pid + SENDERS - (W - 1) % SENDERS) % SENDERS, most, SENDERS):
        for j in tl.static_range(FIRST, W):
            home = (RANK + j) % W
            if (row < tl.load(slot + S.got + home)) & (has(ranks, home) | (j == 0)):
                there = tl.load(peers + home) + to_set
                to = tl.multiple_of((there + L.back).to(tl.pointer_type(rows.dtype.element_ty)), 16)
                to += tl.cast(RANK * M + row, tl.int64) * H
                for start in tl.static_range(0, H, BLOCK):
                    cols = start + tl.arange(0, BLOCK)
                    value = _partial(home, row, rows, slot, cols, L, S, LAYOUT, M, H, K, CAP)
                    tl.store(to + cols, value, mask=cols < H)
                release(flags(there, L.back_flag) + RANK * M + row, step)


@triton.jit
def _partial(s, row, rows, slot, cols, L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, M: tl.constexpr,
             H: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """What this rank's experts made of a row from ``s``: one block of columns in the rows' type."""
    if LAYOUT == EXPERT_MAJOR:
        entry = s * L.entries + row * K
        weights = (slot + S.share).to(tl.pointer_type(tl.float32))
        total = tl.zeros_like(cols).to(tl.float32)
        for k in tl.static_range(K):
            place = tl.load(slot + S.place + entry + k)
            value = tl.load(rows + place.to(tl.int64) * H + cols, mask=(cols < H) & (place >= 0), other=0)
            total += tl.load(weights + entry + k) * value.to(tl.float32)
        return total.to(rows.dtype.element_ty)
    elif LAYOUT == RANK_MAJOR:
        return tl.load(rows + tl.cast(s * M + row, tl.int64) * H + cols, mask=cols < H)
    else:
        at = tl.load(slot + S.start + s) + row
        return tl.load(rows + at.to(tl.int64) * H + cols, mask=(cols < H) & (at < CAP), other=0)


@triton.jit
def _receive(pid, rows, out, slot, mine, peers, firsts, ctl, alarm, step, ranks, T, L: tl.constexpr, S: tl.constexpr,
             LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
             K: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
             STAGED: tl.constexpr, COUNTS: tl.constexpr, TOLERANT: tl.constexpr,
             RENORMALIZE: tl.constexpr):  # fmt: skip
    failed, sent, waited, soon = (), (), (), ()
    comb_flag, missing = flags(mine, L.comb_flag), tl.cast(0, tl.int64)
    for d in tl.static_range(W):
        begin = begin_ns(COUNTS)
        if d != RANK:
            if TOLERANT:  # absent in dispatch is absent here
                ranks &= ~((tl.load(slot + S.got + d) == ABSENT).to(tl.int64) << d)
            missing |= look_soon(comb_flag + d, step, ranks, d)
        soon = soon + (begin_ns(COUNTS) - begin,)
    begin = begin_ns(COUNTS)
    if TOLERANT:
        ranks = decide(comb_flag, step, COMBINE, ranks, missing, ctl, alarm, peers, pid, PROGRAMS, L, RANK, W)
    else:
        never = await_flags(comb_flag, step, step, COMBINE, missing, ctl, alarm, peers, pid == 0, L, RANK, W)
        if pid == 0:
            owe(ctl, step, never != 0)
    later = begin_ns(COUNTS) - begin
    for d in tl.static_range(W):
        status = 0
        if TOLERANT:
            if d != RANK:
                status = _judged_status(d, pid, rows, mine, ctl, alarm, step, ranks, L)
        elif d != RANK:
            late = has(never, d).to(tl.int32)
            gone = has_gone(flags(mine, L.gone) + d, step)
            status, code = _status(mine, d, step, L)
            other = (status == 0) & (late == 0) & (gone == 0) & (code != _code(rows))
            status += late + gone.to(tl.int32)
            if (status != 0) & (late == 0):
                report(ctl, alarm, tl.where(gone, PEER_GONE, PEER_FAILED), d, step)
            if other:
                report(ctl, alarm, MISMATCH, d, unlike(step, 0, code))
            status += other.to(tl.int32)
        failed = failed + (status,)
        waited = waited + (soon[d] + tl.where(has(missing, d), later, 0) if d != RANK else later - later,)
        sent = sent + (tl.where(status == 0, tl.load(slot + S.counts + d), 0) if COUNTS is not None else 0,)
    if COUNTS is not None:  # noqa: SIM102 - one condition is a constant
        if pid == 0:
            add_each(ctl + COUNTS.sent, sent, W)
            add_each(ctl + COUNTS.waited, waited, W)
            tl.atomic_add(ctl + COUNTS.tokens, T.to(tl.int64), sem="relaxed", scope="gpu")
    # Other programs than those that send most, where there are enough.
    for token in range((pid + PROGRAMS // 2) % PROGRAMS, T, PROGRAMS):
        for start in tl.static_range(0, H, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            row = tl.load(slot + S.row_of + token * W + RANK)
            own = tl.zeros_like(cols).to(rows.dtype.element_ty)
            if row >= 0:
                if STAGED:
                    home = tl.multiple_of((mine + L.back).to(tl.pointer_type(rows.dtype.element_ty)), 16)
                    own = tl.load(home + tl.cast(RANK * M + row, tl.int64) * H + cols, mask=cols < H, other=0)
                else:
                    own = _partial(RANK, row, rows, slot, cols, L, S, LAYOUT, M, H, K, CAP)
            total = tl.zeros_like(cols).to(tl.float32)
            for d in tl.static_range(W):
                if d == RANK:
                    total += own.to(tl.float32)
                else:
                    row = tl.load(slot + S.row_of + token * W + d)
                    if (row >= 0) & (failed[d] == 0):
                        back_flag, lost = flags(mine, L.back_flag) + d * M + row, 0
                        if TOLERANT:
                            lost = wait_for(back_flag, step, d, step, COMBINE, ctl, peers, 0, False, L, RANK, W)
                        elif start == 0:
                            await_row(back_flag, step, COMBINE, ctl, alarm, d)
                        back = tl.multiple_of((mine + L.back).to(tl.pointer_type(rows.dtype.element_ty)), 16)
                        back += tl.cast(d * M + row, tl.int64) * H
                        total += tl.load(back + cols, mask=(cols < H) & (lost == 0), other=0).to(tl.float32)
            if RENORMALIZE:
                total *= _scale_of(token, slot, firsts, failed, S, LAYOUT, RANK, W, K)
            tl.store(out + tl.cast(token, tl.int64) * H + cols, total.to(out.dtype.element_ty), mask=cols < H)


@triton.jit
def _judged_status(d, pid, rows, mine, ctl, alarm, step, ranks, L: tl.constexpr):
    """Whether anything but 0 came of rank ``d``: it does not count, has ended, has failed, or did not count us."""
    status = tl.cast(1, tl.int32)
    if has(ranks, d):
        status, code = _status(mine, d, step, L)
        gone = has_gone(flags(mine, L.gone) + d, step)
        if gone:
            condemn(d, step, COMBINE, ctl)
        elif status == NOT_SERVED:
            if pid == 0:
                fall_behind(ctl)
        elif status != 0:
            report(ctl, alarm, PEER_FAILED, d, step)
        elif code != _code(rows):
            report(ctl, alarm, MISMATCH, d, unlike(step, 0, code))
            status += 1
        status += gone.to(tl.int32)
    return status


@triton.jit
def _status(mine, d, step, L: tl.constexpr):
    """What rank ``d`` said of its rows: 0 if they come, and of which type they are. A rank that gives the step up says
    nothing; what stands there then is of an earlier one."""
    word = tl.load(words(mine, L.comb_status) + d)
    said = ((word ^ _tag(step)) >> 16) == 0
    return tl.where(said, word & 0xFF, 1), (word >> 8) & 0xFF


@triton.jit
def _tag(step):
    """The part of a step's number that a status has, at its place."""
    return ((step & 0xFFFF) << 16).to(tl.int32)


@triton.jit
def _code(rows):
    """The row type, as in a dispatch's header."""
    kind: tl.constexpr = rows.dtype.element_ty
    return 1 if kind == tl.float32 else 2 if kind == tl.bfloat16 else 3


@triton.jit
def _scale_of(token, slot, firsts, failed, S: tl.constexpr, LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
              K: tl.constexpr):  # fmt: skip
    """The sum of all weights of a token over that of its live experts: 0 without any, 1 if it lost none."""
    kk = tl.arange(0, triton.next_power_of_2(K))
    at = token * K + kk
    phys = tl.load(slot + S.phys + at, mask=kk < K, other=-1)
    weight = tl.load((slot + S.weight).to(tl.pointer_type(tl.float32)) + at, mask=kk < K, other=0)
    counts = phys >= 0
    if LAYOUT == EXPERT_MAJOR:  # an expert that is named twice has the sum of its weights in both slots
        counts &= tl.load(slot + S.rank + at, mask=kk < K, other=-1) >= 0
    live = tl.zeros_like(counts)
    for d in tl.static_range(W):
        served = (phys >= tl.load(firsts + d)) & (phys < tl.load(firsts + d + 1))
        live |= counts & served & (d == RANK or failed[d] == 0)
    left = tl.sum(tl.where(live, weight, 0.0), 0)
    scale = tl.where(left != 0, tl.sum(tl.where(counts, weight, 0.0), 0) / tl.where(left != 0, left, 1.0), 0.0)
    return tl.where(tl.sum((counts & ~live).to(tl.int32), 0) > 0, scale, 1.0)
