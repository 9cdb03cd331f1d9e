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

from .dispatch import EXPERT_MAJOR, RANK_MAJOR
from .signals import PEER_FAILED, PEER_GONE, TIMEOUT_COMBINE, enter, flags, has_gone, release, report, wait, words


@triton.jit(do_not_specialize=["T"])
def combine(
    rows, out, slot, peers, ctl, alarm, T,
    L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, SENDERS: tl.constexpr, EARLY: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
):  # fmt: skip
    """Combine the experts' ``rows`` into ``out [T, H]``; both contiguous."""
    enter(EARLY)
    pid = tl.program_id(0)
    step = tl.load((slot + S.step).to(tl.pointer_type(tl.int64)))
    parity = step % 2
    to_set = parity * L.set_bytes
    if SEND:  # noqa: SIM102 - one condition is a constant
        if pid < SENDERS:
            _send(pid, rows, slot, peers, to_set, step, ctl, alarm, L, S, LAYOUT, RANK, W, M, H, K, CAP, BLOCK,
                  SENDERS)  # fmt: skip
    if RECEIVE:
        FIRST: tl.constexpr = SENDERS if SENDERS < PROGRAMS else 0
        if pid >= FIRST:
            mine = tl.load(peers + RANK) + to_set
            _receive(pid - FIRST, rows, out, slot, mine, ctl, alarm, step, T, L, S, LAYOUT, RANK, W, M, H, K,
                     CAP, BLOCK, PROGRAMS - FIRST)  # fmt: skip


@triton.jit
def _send(pid, rows, slot, peers, to_set, step, ctl, alarm, L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr,
          RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr,
          BLOCK: tl.constexpr, SENDERS: tl.constexpr):  # fmt: skip
    most = 0
    for j in tl.static_range(1, W):
        home = (RANK + j) % W
        got = tl.load(slot + S.got + home)
        most = tl.maximum(most, got)
        if pid == (j - 1) % SENDERS:
            there = tl.load(peers + home) + to_set
            tl.store(words(there, L.comb_status) + RANK, (got < 0).to(tl.int32))
            release(flags(there, L.comb_flag) + RANK, step)
        if L.rows == L.back:
            mine = tl.load(peers + RANK) + to_set
            wait(flags(mine, L.done_flag) + home, step, ctl, alarm, TIMEOUT_COMBINE, home)
    for row in range((pid + SENDERS - (W - 1) % SENDERS) % SENDERS, most, SENDERS):
        for j in tl.static_range(1, W):
            home = (RANK + j) % W
            if row < tl.load(slot + S.got + home):
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
def _receive(pid, rows, out, slot, mine, ctl, alarm, step, T, L: tl.constexpr, S: tl.constexpr,
             LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
             K: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    failed = ()
    for d in tl.static_range(W):
        status = 0
        if d != RANK:
            late = wait(flags(mine, L.comb_flag) + d, step, ctl, alarm, TIMEOUT_COMBINE, d)
            gone = has_gone(flags(mine, L.gone) + d, step)
            status = late + gone.to(tl.int32) + tl.load(words(mine, L.comb_status) + d)
            if (status != 0) & (late == 0):
                report(ctl, alarm, tl.where(gone, PEER_GONE, PEER_FAILED), d, step)
        failed = failed + (status,)
    # Other programs than those that send most, where there are enough.
    for token in range((pid + PROGRAMS // 2) % PROGRAMS, T, PROGRAMS):
        for start in tl.static_range(0, H, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            row = tl.load(slot + S.row_of + token * W + RANK)
            own = tl.zeros_like(cols).to(rows.dtype.element_ty)
            if row >= 0:
                own = _partial(RANK, row, rows, slot, cols, L, S, LAYOUT, M, H, K, CAP)
            total = tl.zeros_like(cols).to(tl.float32)
            for d in tl.static_range(W):
                if d == RANK:
                    total += own.to(tl.float32)
                else:
                    row = tl.load(slot + S.row_of + token * W + d)
                    if (row >= 0) & (failed[d] == 0):
                        if start == 0:
                            wait(flags(mine, L.back_flag) + d * M + row, step, ctl, alarm, TIMEOUT_COMBINE, d)
                        back = tl.multiple_of((mine + L.back).to(tl.pointer_type(rows.dtype.element_ty)), 16)
                        back += tl.cast(d * M + row, tl.int64) * H
                        total += tl.load(back + cols, mask=cols < H, other=0).to(tl.float32)
            tl.store(out + tl.cast(token, tl.int64) * H + cols, total.to(out.dtype.element_ty), mask=cols < H)
