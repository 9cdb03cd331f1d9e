"""Dispatch: push rows to their ranks, and unpack what arrives into the layout that experts read. One launch.

A token crosses to a rank once. Its row goes to the sender's own region there, with the slots that name an expert of
that rank; one flag commits each row, another the header (how many rows come, and in EXPERT_MAJOR how many for each
expert). The receiver assembles its layout from local memory, and its own rows straight from the input.

Every program sends before it waits, and waits only for peers. Where what came back two steps ago lies in the same
memory (HIGH_THROUGHPUT), a sender first waits until its peers have read it: with two steps open, their combine may
still be running.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from ..geometry import CONTROL, HEAD_WORDS
from .counting import add_each, add_vector, begin_ns
from .judging import (
    ABSENT,
    condemn,
    counting,
    decide,
    fall_behind,
    hear,
    left_of,
    numbered,
    sign,
    tell,
    wait_for,
)
from .rows import copy_scales, encoded, scales_at
from .signals import (
    MISMATCH,
    OVERFLOW,
    PEER_FAILED,
    PEER_GONE,
    enter,
    flags,
    has_gone,
    reals,
    release,
    report,
    spoilt,
    standing,
    unlike,
    words,
)
from .waiting import DISPATCH, await_flags, await_owed, await_row, has, look_soon

_LAUNCHES = tl.constexpr(CONTROL.launches)
_DONE = tl.constexpr(CONTROL.done)
_CAME_BACK = tl.constexpr(CONTROL.came_back)
_HEAD = tl.constexpr(HEAD_WORDS)

EXPERT_MAJOR = tl.constexpr(0)
RANK_MAJOR = tl.constexpr(1)
FLAT = tl.constexpr(2)


@triton.jit
def dispatch(
    x, scales, out, out_scales, out_ids, out_weights, out_counts, slot, peers, firsts, ctl, alarm, x_t, x_h, scales_t,
    scales_s, L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr, CAP: tl.constexpr,
    CODE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, SENDERS: tl.constexpr, EARLY: tl.constexpr,
    SEND: tl.constexpr, RECEIVE: tl.constexpr, STAGED: tl.constexpr, COUNTS: tl.constexpr, R: tl.constexpr,
    TOLERANT: tl.constexpr,
):  # fmt: skip
    """Send tokens ``x [T, H]`` and receive into ``out``. ``COUNTS``: where to count for stats, or None. ``TOLERANT``:
    whether a rank that does not come is left out and accused (see ``judging``), or ends all.

    ``R``: whether ``x`` is encoded on its way, or ``scales [T, R.scales]`` go with it; both arrive in ``out_scales``.
    Elements of one byte are uint8, and scales that go along integers of their width.

    ``STAGED``: whether this rank's own rows go through its memory like those of its peers, because ``x`` may change
    before they are received.

    ``PROGRAMS`` is the grid, the same for every launch of a Fleet: the step's number follows from a count of programs.
    The first ``SENDERS`` programs send; all receive, or where ``SENDERS < PROGRAMS`` the others.
    """
    enter(EARLY)
    pid = tl.program_id(0)
    left = left_of(ctl, RANK, W) if TOLERANT else ()  # on its way while the atomic is
    stands = standing(ctl)
    if SEND:
        step = (tl.atomic_add(ctl + _LAUNCHES, 1, sem="relaxed", scope="gpu") // PROGRAMS) + 1
        step = numbered(step, ctl, TOLERANT)
        if pid == 0:
            tl.store((slot + S.step).to(tl.pointer_type(tl.int64)), step)
    else:
        step = tl.load((slot + S.step).to(tl.pointer_type(tl.int64)))
    parity = step % 2
    to_set = parity * L.set_bytes
    ranks = counting(left, step, DISPATCH, RANK, W) if TOLERANT else -1
    if SEND:  # noqa: SIM102 - one condition is a constant
        if pid < SENDERS:
            _send(pid, x, scales, out, out_scales, slot, peers, firsts, ctl, alarm, to_set, step, ranks, stands, x_t,
                  x_h, scales_t, scales_s, L, S, LAYOUT, RANK, W, M, H, K, KP, CODE, BLOCK, SENDERS, STAGED, R,
                  TOLERANT)  # fmt: skip
    if RECEIVE:
        FIRST: tl.constexpr = SENDERS if SENDERS < PROGRAMS else 0
        if pid >= FIRST:
            mine = tl.load(peers + RANK) + to_set
            _receive(pid - FIRST, x, scales, out, out_scales, out_ids, out_weights, out_counts, slot, mine, peers,
                     firsts, ctl, alarm, step, ranks, x_t, x_h, scales_t, scales_s, L, S, LAYOUT, RANK, W, M, H, K, KP,
                     LOCAL, CAP, CODE, BLOCK, PROGRAMS - FIRST, STAGED, COUNTS, R, TOLERANT)  # fmt: skip
            if L.rows == L.back:  # combine's rows come into the same memory: tell the peers that it is free
                tell(ctl + _DONE, PROGRAMS - FIRST, to_set + L.done_flag, step, ranks, peers, RANK, W)


@triton.jit
def _send(pid, x, scales, out, out_scales, slot, peers, firsts, ctl, alarm, to_set, step, ranks, stands, x_t, x_h,
          scales_t, scales_s, L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, RANK: tl.constexpr,
          W: tl.constexpr, M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, CODE: tl.constexpr,
          BLOCK: tl.constexpr, SENDERS: tl.constexpr, STAGED: tl.constexpr, R: tl.constexpr,
          TOLERANT: tl.constexpr):  # fmt: skip
    FIRST: tl.constexpr = 0 if STAGED else 1
    mine = tl.load(peers + RANK) + to_set
    failed = step < 0 if TOLERANT else spoilt(stands[0], step, DISPATCH)
    if not TOLERANT:
        owed = tl.where(failed, 0, tl.where(step % 2 == 0, stands[1], stands[2]))
        failed |= await_owed(owed, mine, step, ctl, alarm, peers, pid == 0, L, RANK, W) != 0
    most = tl.load(slot + S.counts + RANK) if STAGED else 0
    for j in tl.static_range(1, W):
        d = (RANK + j) % W
        most = tl.maximum(most, tl.load(slot + S.counts + d))
        if (pid == (j - 1) % SENDERS) & has(ranks, d):
            _send_header(d, slot, tl.load(peers + d) + to_set, firsts, step, ranks, failed, L, S, LAYOUT, RANK, K,
                         CODE, TOLERANT)  # fmt: skip
    if L.rows == L.back:  # what came back into the same memory two steps ago has to be read first
        before = tl.load(ctl + _CAME_BACK + step % 2)
        read_flag, missing = flags(mine, L.read_flag), tl.cast(0, tl.int64)
        for j in tl.static_range(1, W):
            d = (RANK + j) % W
            if TOLERANT:
                if has(ranks, d) & (tl.load(slot + S.counts + d) > 0):
                    late = wait_for(read_flag + d, before, d, step, DISPATCH, ctl, peers, ranks, False, L, RANK, W)
                    ranks &= ~(late.to(tl.int64) << d)
            else:
                missing |= look_soon(read_flag + d, before, tl.where(failed, 0, -1).to(tl.int64), d)
        if not TOLERANT:
            late = await_flags(
                read_flag, before, step, DISPATCH, missing, ctl, alarm, peers, pid == 0, L, RANK, W, True
            )
            failed |= late != 0
    most = tl.where(failed, 0, most)
    kk = tl.arange(0, KP)
    # The lowest programs have sent headers, so the first rows are for those after them.
    for row in range((pid + SENDERS - (W - 1) % SENDERS) % SENDERS, most, SENDERS):
        for j in tl.static_range(FIRST, W):
            d = (RANK + j) % W
            if (row < tl.load(slot + S.counts + d)) & (has(ranks, d) | (j == 0)):
                there = tl.load(peers + d) + to_set
                token = tl.load(slot + S.token_of + d * M + row)
                to = tl.multiple_of((there + L.rows).to(tl.pointer_type(out.dtype.element_ty)), 16)
                to += tl.cast(RANK * L.region + row, tl.int64) * H
                if R.encode:
                    scales_to = scales_at(there, L.scales, out_scales, RANK * M + row, R)
                    PIECE: tl.constexpr = R.piece
                    for start in tl.static_range(0, H, PIECE):
                        cols, bits, block, scale = encoded(x + token.to(tl.int64) * x_t, x_h, start, H, R)
                        tl.store(to + cols, bits, mask=cols < H)
                        tl.store(scales_to + block, scale, mask=block < R.scales)
                else:
                    for start in tl.static_range(0, H, BLOCK):
                        cols = start + tl.arange(0, BLOCK)
                        value = tl.load(x + token.to(tl.int64) * x_t + cols.to(tl.int64) * x_h, mask=cols < H)
                        tl.store(to + cols, value, mask=cols < H)
                    if R.scales > 0:
                        scales_to = scales_at(there, L.scales, out_scales, RANK * M + row, R)
                        copy_scales(scales + token.to(tl.int64) * scales_t, scales_s, scales_to, R)
                local, weight, rank = _slots_of(token, d, slot, firsts, kk, S, LAYOUT, K)
                entry = RANK * L.entries + row * K + kk
                tl.store(words(there, L.local) + entry, local, mask=kk < K)
                tl.store(reals(there, L.weight) + entry, weight, mask=kk < K)
                if LAYOUT == EXPERT_MAJOR:
                    tl.store(words(there, L.rank) + entry, rank, mask=kk < K)
                release(flags(there, L.row_flag) + RANK * M + row, step)


@triton.jit
def _send_header(d, slot, there, firsts, step, ranks, failed, L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr,
                 RANK: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr, TOLERANT: tl.constexpr):  # fmt: skip
    head = words(there, L.head) + RANK * L.head_words
    field = tl.arange(0, 4)
    rows, status = tl.load(slot + S.counts + d), 0 if TOLERANT else step.to(tl.int32)
    if failed == 0:
        tl.store(head + field, tl.where(field == 0, rows, tl.where(field == 1, K, tl.where(field == 2, CODE, status))))
        if TOLERANT:
            sign(head, step, ranks, RANK)
        if LAYOUT == EXPERT_MAJOR:
            low = tl.load(firsts + d)
            held = tl.load(firsts + d + 1) - low
            for start in range(0, held, 256):
                e = start + tl.arange(0, 256)
                tl.store(head + _HEAD + e, tl.load(slot + S.per_expert + low + e, mask=e < held), mask=e < held)
    release(flags(there, L.head_flag) + RANK, step)


@triton.jit
def _slots_of(token, d, slot, firsts, kk, S: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr):
    """A token's slots as rank ``d`` sees them: local expert or -1, weight, and in EXPERT_MAJOR place or -1."""
    at = token * K + kk
    low = tl.load(firsts + d)
    phys = tl.load(slot + S.phys + at, mask=kk < K, other=-1)
    weight = tl.load((slot + S.weight).to(tl.pointer_type(tl.float32)) + at, mask=kk < K, other=0)
    rank = kk
    if LAYOUT == EXPERT_MAJOR:
        rank = tl.load(slot + S.rank + at, mask=kk < K, other=-1)
    here = (phys >= low) & (phys < tl.load(firsts + d + 1))
    return tl.where(here, phys - low, -1), tl.where(here, weight, 0.0), rank


@triton.jit
def _receive(pid, x, scales, out, out_scales, out_ids, out_weights, out_counts, slot, mine, peers, firsts, ctl, alarm,
             step, ranks, x_t, x_h, scales_t, scales_s, L: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr,
             RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
             LOCAL: tl.constexpr, CAP: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
             PROGRAMS: tl.constexpr, STAGED: tl.constexpr, COUNTS: tl.constexpr, R: tl.constexpr,
             TOLERANT: tl.constexpr):  # fmt: skip
    kk = tl.arange(0, KP)
    counts, starts, waited, soon, total = (), (), (), (), 0
    head_flag, missing = flags(mine, L.head_flag), tl.cast(0, tl.int64)
    for s in tl.static_range(W):
        begin = begin_ns(COUNTS)
        if s != RANK:
            missing |= look_soon(head_flag + s, step, ranks, s)
        soon = soon + (begin_ns(COUNTS) - begin,)
    begin = begin_ns(COUNTS)
    if TOLERANT:
        present = decide(head_flag, step, DISPATCH, ranks, missing, ctl, alarm, peers, pid, PROGRAMS, L, RANK, W)
    else:
        present = ~await_flags(head_flag, step, step, DISPATCH, missing, ctl, alarm, peers, pid == 0, L, RANK, W)
    later = begin_ns(COUNTS) - begin
    for s in tl.static_range(W):
        if s == RANK:
            rows = tl.load(slot + S.counts + RANK)
        else:
            rows = tl.cast(ABSENT if TOLERANT else -1, tl.int32)
            if has(present, s):
                if TOLERANT:
                    rows = _judged_header(s, pid, mine, ctl, alarm, step, ranks, L, RANK, M, K, CODE)
                else:
                    rows = _read_header(s, mine, ctl, alarm, step, L, M, K, CODE)
        waited = waited + (soon[s] + tl.where(has(missing, s), later, 0) if s != RANK else later - later,)
        counts, starts = counts + (rows,), starts + (total,)
        total += tl.maximum(rows, 0)
    if pid == 0:
        for s in tl.static_range(W):
            fits = starts[s] + counts[s] <= CAP if LAYOUT == FLAT else True  # else its step has failed, too
            tl.store(slot + S.got + s, tl.where(fits, counts[s], -1))
            tl.store(slot + S.start + s, starts[s])
        if COUNTS is not None:
            add_each(ctl + COUNTS.got, counts, W)
            add_each(ctl + COUNTS.waited, waited, W)
        if LAYOUT == EXPERT_MAJOR:
            _count_experts(counts, out_counts, slot, mine, firsts, ctl, L, S, RANK, W, LOCAL, COUNTS)
        elif LAYOUT == RANK_MAJOR:
            for s in tl.static_range(W):
                tl.store(out_counts + s, tl.maximum(counts[s], 0))
        else:
            tl.store(out_counts, tl.minimum(total, CAP))
            if total > CAP:
                report(ctl, alarm, OVERFLOW, RANK, total)
    if LAYOUT == RANK_MAJOR:
        for s in tl.static_range(W):
            _blank(pid, s * M + tl.maximum(counts[s], 0), s * M + M, out_ids, out_weights, kk, K, KP, PROGRAMS)
    elif LAYOUT == FLAT:
        _blank(pid, total, CAP, out_ids, out_weights, kk, K, KP, PROGRAMS)
    for j in tl.static_range(W):  # its own first; by other programs than those that send most
        _unpack((RANK + j) % W, (pid + (j + 1) * (PROGRAMS // W)) % PROGRAMS, counts, starts, x, scales, out,
                out_scales, out_ids, out_weights, slot, mine, peers, firsts, ctl, alarm, step, x_t, x_h, scales_t,
                scales_s, L, S, LAYOUT, RANK, W, M, H, K, KP, LOCAL, CAP, BLOCK, PROGRAMS, STAGED, COUNTS, R,
                TOLERANT)  # fmt: skip


@triton.jit
def _unpack(s: tl.constexpr, first, counts, starts, x, scales, out, out_scales, out_ids, out_weights, slot, mine,
            peers, firsts, ctl, alarm, step, x_t, x_h, scales_t, scales_s, L: tl.constexpr, S: tl.constexpr,
            LAYOUT: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
            K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
            PROGRAMS: tl.constexpr, STAGED: tl.constexpr, COUNTS: tl.constexpr, R: tl.constexpr,
            TOLERANT: tl.constexpr):  # fmt: skip
    """Bring the rows of source ``s`` from row ``first`` on, every ``PROGRAMS``-th, into the layout."""
    kk = tl.arange(0, KP)
    DIRECT: tl.constexpr = s == RANK and not STAGED
    for row in range(first, counts[s], PROGRAMS):
        if DIRECT:
            token = tl.load(slot + S.token_of + RANK * M + row)
            source = x + token.to(tl.int64) * x_t
            if not R.encode:
                value = tl.load(source + tl.arange(0, BLOCK).to(tl.int64) * x_h, mask=tl.arange(0, BLOCK) < H)
            local, weight, rank = _slots_of(token, RANK, slot, firsts, kk, S, LAYOUT, K)
        else:
            row_flag = flags(mine, L.row_flag) + s * M + row
            if TOLERANT:
                lost = wait_for(row_flag, step, s, step, DISPATCH, ctl, peers, 0, False, L, RANK, W)
            else:
                await_row(row_flag, step, DISPATCH, ctl, alarm, s)
            source = tl.multiple_of((mine + L.rows).to(tl.pointer_type(out.dtype.element_ty)), 16)
            source += tl.cast(s * L.region + row, tl.int64) * H
            value = tl.load(source + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < H)
            entry = s * L.entries + row * K + kk
            local = tl.load(words(mine, L.local) + entry, mask=kk < K, other=-1)
            weight = tl.load(reals(mine, L.weight) + entry, mask=kk < K, other=0)
            rank = kk
            if LAYOUT == EXPERT_MAJOR:
                rank = tl.load(words(mine, L.rank) + entry, mask=kk < K, other=-1)
            local = tl.where(local < LOCAL, local, -1)  # nothing received is trusted
            if TOLERANT:  # experts leave out a row that never came, and combine will leave out all of its rank
                local, weight = tl.where(lost == 0, local, -1), tl.where(lost == 0, weight, 0.0)
        if LAYOUT == EXPERT_MAJOR:
            before = _rows_before(s, local, counts, slot, mine, firsts, L, S, RANK)
            there = (local >= 0) & (rank >= 0) & (before + rank < M * W)
            place = tl.where(there, local * (M * W) + before + rank, -1)
            entry = s * L.entries + row * K + kk
            tl.store(slot + S.place + entry, place, mask=kk < K)
            kept = (slot + S.share).to(tl.pointer_type(tl.float32))
            tl.store(kept + entry, tl.where(there, weight, 0.0), mask=kk < K)
        elif LAYOUT == RANK_MAJOR:
            place = tl.where(kk == 0, s * M + row, -1)
        else:
            place = tl.where((kk == 0) & (starts[s] + row < CAP), starts[s] + row, -1)
        if LAYOUT != EXPERT_MAJOR:
            at = tl.max(place, 0)
            tl.store(out_ids + at.to(tl.int64) * K + kk, local.to(tl.int64), mask=(kk < K) & (at >= 0))
            tl.store(out_weights + at.to(tl.int64) * K + kk, weight, mask=(kk < K) & (at >= 0))
            if COUNTS is not None:
                add_vector(ctl + COUNTS.experts + local, kk - kk + 1, (kk < K) & (at >= 0) & (local >= 0))
        COPIES: tl.constexpr = K if LAYOUT == EXPERT_MAJOR else 1
        ENCODE: tl.constexpr = R.encode and DIRECT
        if ENCODE:
            PIECE: tl.constexpr = R.piece
            for start in tl.static_range(0, H, PIECE):
                cols, bits, block, scale = encoded(source, x_h, start, H, R)
                for k in tl.static_range(COPIES):
                    at = tl.sum(tl.where(kk == k, place, 0), 0).to(tl.int64)
                    tl.store(out + at * H + cols, bits, mask=(cols < H) & (at >= 0))
                    tl.store(out_scales + at * R.scales + block, scale, mask=(block < R.scales) & (at >= 0))
        else:
            for start in tl.static_range(0, H, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                if start > 0:
                    value = tl.load(source + cols.to(tl.int64) * (x_h if DIRECT else 1), mask=cols < H)
                for k in tl.static_range(COPIES):
                    at = tl.sum(tl.where(kk == k, place, 0), 0)
                    tl.store(out + at.to(tl.int64) * H + cols, value, mask=(cols < H) & (at >= 0))
            if R.scales > 0:
                if DIRECT:
                    scales_from = scales + token.to(tl.int64) * scales_t
                else:
                    scales_from = scales_at(mine, L.scales, out_scales, s * M + row, R)
                for k in tl.static_range(COPIES):
                    at = tl.sum(tl.where(kk == k, place, 0), 0).to(tl.int64)
                    if at >= 0:
                        copy_scales(scales_from, scales_s if DIRECT else 1, out_scales + at * R.scales, R)


@triton.jit
def _read_header(s, mine, ctl, alarm, step, L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr):
    """Rows that rank ``s`` brings, whose flag is there, -1 if it failed in this step."""
    head = words(mine, L.head) + s * L.head_words
    rows, topk, code, status = tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    gone, other = has_gone(flags(mine, L.gone) + s, step), (topk != K) | (code != CODE)
    failed = status != step.to(tl.int32)  # a rank that gives the step up leaves what stood there before
    bad = gone | other | failed
    if bad:
        kind = tl.where(gone, PEER_GONE, tl.where(failed, PEER_FAILED, MISMATCH))
        report(ctl, alarm, kind, s, tl.where(kind == MISMATCH, unlike(step, topk, code), step))
    return tl.where(bad | (rows > M), -1, rows)


@triton.jit
def _judged_header(s, pid, mine, ctl, alarm, step, ranks, L: tl.constexpr, RANK: tl.constexpr, M: tl.constexpr,
                   K: tl.constexpr, CODE: tl.constexpr):  # fmt: skip
    """Rows that rank ``s`` brings, whose flag is there: -1 if it failed in this step, ABSENT if it does not count."""
    head = words(mine, L.head) + s * L.head_words
    rows, topk, code, status = tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    gone, failed, other = has_gone(flags(mine, L.gone) + s, step), status != 0, (topk != K) | (code != CODE)
    elsewhere, unheard = hear(head, step, ranks, RANK)
    if gone:
        condemn(s, step, DISPATCH, ctl)
    elif (failed | other) & (elsewhere == 0):
        number = tl.where(failed, step, unlike(step, topk, code))
        report(ctl, alarm, tl.where(failed, PEER_FAILED, MISMATCH), s, number)
    if (pid == 0) & (gone == 0) & (elsewhere | unheard):
        fall_behind(ctl)
    return tl.where(gone | elsewhere, ABSENT, tl.where(failed | other | (rows > M), -1, rows))


@triton.jit
def _rows_before(s, local, counts, slot, mine, firsts, L: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr):
    """For each slot, how many rows the sources before ``s`` bring to its expert."""
    before = tl.zeros_like(local)
    for q in tl.static_range(s):
        if q == RANK:
            per_expert = slot + S.per_expert + tl.load(firsts + RANK)
        else:
            per_expert = words(mine, L.head) + q * L.head_words + _HEAD
        before += tl.load(per_expert + local, mask=(local >= 0) & (counts[q] >= 0), other=0)
    return before


@triton.jit
def _count_experts(counts, out_counts, slot, mine, firsts, ctl, L: tl.constexpr, S: tl.constexpr,
                   RANK: tl.constexpr, W: tl.constexpr, LOCAL: tl.constexpr, COUNTS: tl.constexpr):  # fmt: skip
    for start in range(0, LOCAL, 256):
        e = start + tl.arange(0, 256)
        total = tl.zeros([256], tl.int32)
        for s in tl.static_range(W):
            if s == RANK:
                per_expert = slot + S.per_expert + tl.load(firsts + RANK)
            else:
                per_expert = words(mine, L.head) + s * L.head_words + _HEAD
            total += tl.load(per_expert + e, mask=(e < LOCAL) & (counts[s] >= 0), other=0)
        tl.store(out_counts + e, total, mask=e < LOCAL)
        if COUNTS is not None:
            add_vector(ctl + COUNTS.experts + e, total, (e < LOCAL) & (total > 0))


@triton.jit
def _blank(pid, begin, end, out_ids, out_weights, kk, K: tl.constexpr, KP: tl.constexpr, PROGRAMS: tl.constexpr):
    """Ids -1 and weights 0 in rows ``begin`` to ``end`` of the received routing."""
    ROWS: tl.constexpr = 32
    for first in range(begin + pid * ROWS, end, PROGRAMS * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        at = row.to(tl.int64) * K + kk[None, :]
        mask = (row < end) & (kk[None, :] < K)
        tl.store(out_ids + at, tl.full([ROWS, KP], -1, tl.int64), mask=mask)
        tl.store(out_weights + at, tl.zeros([ROWS, KP], tl.float32), mask=mask)
