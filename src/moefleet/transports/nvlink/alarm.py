"""The word in which kernels report what went wrong, as errors."""

from __future__ import annotations

import enum
from collections.abc import Callable

from ...errors import MoEEpConfigError, MoEEpError, MoEEpPeerError, MoEEpTimeoutError, config_error
from ...fleet.stepping import step_failed
from ...substrate.control import Header
from ...substrate.rowtypes import code_name


class Trouble(enum.IntEnum):
    """Low byte of the word; above it 16 bits of rank, then a step, rows (OVERFLOW), rows and above 20 bits of them
    those that were announced (UNEXPECTED), 8 bits of K (0 in combine), 8 of a row code and a step (MISMATCH), or 4 bits
    of how far the other rank's phase is from this one's, plus 8, and this one's (CROSSED)."""

    TIMEOUT_DISPATCH = 1
    TIMEOUT_COMBINE = 2
    PEER_FAILED = 3
    MISMATCH = 4
    OVERFLOW = 5
    PEER_GONE = 6
    CROSSED = 7
    PEER_ENDED = 8
    UNEXPECTED = 16


TIMEOUTS = (Trouble.TIMEOUT_DISPATCH, Trouble.TIMEOUT_COMBINE)


def trouble_in(word: int) -> Trouble:
    """What kind a word reports."""
    return Trouble(word & 0xFF)


def to_error(
    word: int, capacity: int, timeout_s: float, note_of: Callable[[int, int], Header | None] = lambda rank, step: None
) -> MoEEpError:
    """The error that a word stands for. ``note_of(rank, step)`` is what a rank said when it gave the step up."""
    trouble, rank, number = trouble_in(word), word >> 8 & 0xFFFF, word >> 24
    if trouble in TIMEOUTS:
        phase = "dispatch" if trouble is Trouble.TIMEOUT_DISPATCH else "combine"
        return MoEEpTimeoutError(
            f"rank {rank} did not come to {phase} of step {number} within {timeout_s:g} s (BootstrapConfig.timeout_s); "
            "if it still runs, the next calls wait for it again: look at its process",
            ranks=[rank],
        )
    if trouble is Trouble.PEER_ENDED:
        return MoEEpPeerError(
            f"the process of rank {rank} ended before it came to step {number}; build another Fleet",
            rank=rank,
            reason="its process has ended",
        )
    if trouble is Trouble.CROSSED:
        mine = number >> 4
        reason = f"rank {rank} itself waits in {_call(mine + (number & 15) - 8)} for this rank"
        return MoEEpPeerError(
            f"this rank waits in {_call(mine)} for rank {rank}: {reason}; "
            "all ranks must make the same calls in the same order",
            rank=rank,
            reason=reason,
        )
    if trouble is Trouble.PEER_FAILED:
        if (note := note_of(rank, number)) is not None:
            return step_failed(note.origin, number, note.operation, note.reason)
        return MoEEpPeerError(
            f"rank {rank} failed in step {number}; its own error says why", rank=rank, reason="failed in this step"
        )
    if trouble is Trouble.PEER_GONE:
        return MoEEpPeerError(
            f"rank {rank} destroyed its Fleet before step {number}; build another Fleet", rank=rank, reason="it ended"
        )
    if trouble is Trouble.MISMATCH:
        topk, rows = number & 0xFF, code_name(number >> 8 & 0xFF)
        theirs = f"K = {topk} and {rows}" if topk else f"{rows} for combine"
        return MoEEpPeerError(
            f"rank {rank} brought {theirs} to step {number >> 16}; a step has one K and one row type on each way",
            rank=rank,
            reason=theirs,
        )
    if trouble is Trouble.UNEXPECTED:
        arrived, announced = number & 0xFFFFF, number >> 20 & 0xFFFFF
        return config_error(
            "HandleAlgoKnobNumReceivedTokens.target", announced, f"the {arrived} that arrived on rank {rank}"
        )
    assert trouble is Trouble.OVERFLOW
    return _overflow(number, capacity, rank)


def _call(phase: int) -> str:
    return f"{'combine' if phase % 2 else 'dispatch'} of step {phase // 2}"


def _overflow(rows: int, capacity: int, rank: int) -> MoEEpConfigError:
    return config_error(
        "FleetParams.max_recv_tokens_per_rank",
        f"{rows} rows arrived on rank {rank}",
        f"at most {capacity}",
        f"build the Fleet with max_recv_tokens_per_rank >= {rows}; M*W always suffices",
    )
