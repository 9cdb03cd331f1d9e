"""Read one step's routing: a snapshot of ids and weights, and where each row goes. One launch, nothing shared.

Three kinds of programs, none of which waits for another: one for each rank (which tokens go there, in which order),
one for each group of experts (EXPERT_MAJOR: each slot's place among the rows for its expert), and one for each chunk
of tokens (the snapshot).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from ..geometry import CONTROL
from .signals import enter

_BAD_IDS = tl.constexpr(CONTROL.bad_ids)


@triton.jit
def _physical(ids, inside, table, mask_of, firsts, W: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Physical slot of each id (int32), -1 for "no expert", ids out of range, no owner, and masked ranks."""
    good = inside & (ids >= 0) & (ids < E)
    phys = tl.where(good, ids, -1).to(tl.int32)
    if MAPPED:
        phys = tl.load(table + phys, mask=good, other=-1)
    if MASKED:
        for d in tl.static_range(W):
            dead = tl.load(mask_of + d) == 0
            phys = tl.where(dead & (phys >= tl.load(firsts + d)) & (phys < tl.load(firsts + d + 1)), -1, phys)
    return phys


@triton.jit(do_not_specialize=["T"])
def update(
    ids_at, weights_at, slot, table, firsts, mask_of, ctl, T, ids_t, ids_k, weights_t, weights_k,
    S: tl.constexpr, W: tl.constexpr, E: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    MAPPED: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Fill a handle's ``slot`` from ids and weights ``[T, K]`` of any strides."""
    enter(EARLY)
    pid = tl.program_id(0)
    if pid < W:
        _one_rank(pid, ids_at, slot, table, firsts, mask_of, T, ids_t, ids_k, S, W, E, M, K, CHUNK, MAPPED, MASKED)
    elif pid < W + GROUPS:
        _some_experts(pid - W, ids_at, slot, table, firsts, mask_of, T, ids_t, ids_k, S, W, E, P, K, CHUNK, GROUP,
                      MAPPED, MASKED)  # fmt: skip
    else:
        _some_tokens(pid - W - GROUPS, ids_at, weights_at, slot, table, firsts, mask_of, ctl, T, ids_t, ids_k,
                     weights_t, weights_k, S, W, E, K, KP, ROWS, MAPPED, MASKED, GROUPS > 0)  # fmt: skip


@triton.jit
def _one_rank(d, ids_at, slot, table, firsts, mask_of, T, ids_t, ids_k, S: tl.constexpr, W: tl.constexpr,
              E: tl.constexpr, M: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, MAPPED: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    low, high = tl.load(firsts + d), tl.load(firsts + d + 1)
    count = 0
    for start in range(0, T, CHUNK):
        t = start + tl.arange(0, CHUNK)
        inside = t < T
        goes = tl.zeros([CHUNK], tl.int1)
        for k in tl.static_range(K):
            ids = tl.load(ids_at + t.to(tl.int64) * ids_t + k * ids_k, mask=inside, other=-1)
            phys = _physical(ids, inside, table, mask_of, firsts, W, E, MAPPED, MASKED)
            goes = goes | ((phys >= low) & (phys < high))
        one = goes.to(tl.int32)
        row = count + tl.cumsum(one, 0) - one
        tl.store(slot + S.row_of + t * W + d, tl.where(goes, row, -1), mask=inside)
        tl.store(slot + S.token_of + d * M + row, t, mask=goes)
        count += tl.sum(one, 0)
    tl.store(slot + S.counts + d, count)


@triton.jit
def _some_experts(group, ids_at, slot, table, firsts, mask_of, T, ids_t, ids_k, S: tl.constexpr, W: tl.constexpr,
                  E: tl.constexpr, P: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
                  MAPPED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    expert = group * GROUP + tl.arange(0, GROUP)
    count = tl.zeros([GROUP], tl.int32)
    for start in range(0, T, CHUNK):
        # Everything is [CHUNK, GROUP], the loads too, so that nothing has to change places between threads.
        t = (start + tl.arange(0, CHUNK))[:, None] + tl.zeros([CHUNK, GROUP], tl.int32)
        inside = t < T
        named, hits = tl.zeros([CHUNK, GROUP], tl.int1), ()
        for k in tl.static_range(K):
            ids = tl.load(ids_at + t.to(tl.int64) * ids_t + k * ids_k, mask=inside, other=-1)
            phys = _physical(ids, inside, table, mask_of, firsts, W, E, MAPPED, MASKED)
            hits = hits + (phys == expert[None, :],)
            named = named | hits[k]
        one = named.to(tl.int32)
        rank = count[None, :] + tl.cumsum(one, 0) - one
        before = tl.zeros([CHUNK, GROUP], tl.int1)
        for k in tl.static_range(K):
            tl.store(slot + S.rank + t * K + k, tl.where(before, -1, rank), mask=hits[k])
            before = before | hits[k]
        count += tl.sum(one, 0)
    tl.store(slot + S.per_expert + expert, count, mask=expert < P)


@triton.jit
def _some_tokens(chunk, ids_at, weights_at, slot, table, firsts, mask_of, ctl, T, ids_t, ids_k, weights_t, weights_k,
                 S: tl.constexpr, W: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                 ROWS: tl.constexpr, MAPPED: tl.constexpr, MASKED: tl.constexpr, MERGE: tl.constexpr):  # fmt: skip
    t = (chunk * ROWS + tl.arange(0, ROWS))[:, None]
    k = tl.arange(0, KP)[None, :]
    inside = (t < T) & (k < K)
    ids = tl.load(ids_at + t.to(tl.int64) * ids_t + k * ids_k, mask=inside, other=-1)
    weights = tl.load(weights_at + t.to(tl.int64) * weights_t + k * weights_k, mask=inside, other=0).to(tl.float32)
    phys = _physical(ids, inside, table, mask_of, firsts, W, E, MAPPED, MASKED)
    if MERGE:  # an expert that a token names twice has one row, with the sum of the slots' weights
        total = tl.zeros([ROWS, KP], tl.float32)
        for other in tl.static_range(K):
            there = t < T
            again = tl.load(ids_at + t.to(tl.int64) * ids_t + other * ids_k, mask=there, other=-1)
            share = tl.load(weights_at + t.to(tl.int64) * weights_t + other * weights_k, mask=there, other=0)
            total += tl.where(again == ids, share.to(tl.float32), 0.0)
        weights = total
        tl.store(slot + S.rank + t * K + k, -1, mask=inside & (phys < 0))
    tl.store(slot + S.phys + t * K + k, phys, mask=inside)
    tl.store((slot + S.weight).to(tl.pointer_type(tl.float32)) + t * K + k, weights, mask=inside)
    bad = tl.sum(tl.sum((inside & ((ids < -1) | (ids >= E))).to(tl.int32), 1), 0)
    if bad > 0:
        tl.atomic_add(ctl + _BAD_IDS, bad.to(tl.int64))
