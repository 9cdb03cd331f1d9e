"""From what a rank said, and how its process ended, to values and errors for the caller."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from ..errors import MoEEpConfigError, MoEEpError, MoEEpTimeoutError, config_error
from .process import RankProcess
from .wire import Buffer, Reply, Said


@dataclass(frozen=True)
class RankResult:
    """How one rank's call ended.

    Args:
        rank: its number, 0 to ``world_size - 1``.
        value: what fn returned, or ``None``.
        error: what fn raised, with the rank's own traceback as ``__cause__``. :class:`MoEEpError` where that cannot be
            pickled or the process died, :class:`MoEEpTimeoutError` where it did not end in time, with the Python stacks
            of its threads at that moment in the message. ``None`` where all went well.
        exitcode: of the process; negative for the signal that ended it. In a :class:`RankPool`, whose processes stay,
            0 where fn returned and 1 where it raised. ``None`` if not even SIGKILL ended it.
    """

    rank: int
    value: Any
    error: Exception | None
    exitcode: int | None


class RankTraceback(Exception):
    """Cause of an error that came from a rank: the traceback there, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].rstrip()}\n"""'


def result_of(rank: RankProcess, expired_s: float | None, last: bool) -> RankResult:
    """Put together what is known of a call that is over. ``expired_s``: the timeout, if it is what ended the rank."""
    rank.flush_output()
    if rank.reply is None:
        if expired_s is not None:
            late = too_late(rank, f"rank {rank.rank} did not return within {expired_s} s and was ended")
            return RankResult(rank.rank, None, late, rank.exitcode)
        died = MoEEpError(f"rank {rank.rank} {rank.how_it_ended()} before fn returned")
        return RankResult(rank.rank, None, died, rank.exitcode)
    reply, body = rank.reply
    exitcode = rank.exitcode if last or expired_s is not None else reply.exitcode
    if reply.said is Said.RAISED:
        return RankResult(rank.rank, None, rebuild(rank.rank, reply, body), exitcode)
    try:
        value = pickle.loads(body)
    except Exception as error:
        unreadable = MoEEpError(f"the return value of rank {rank.rank} cannot be unpickled here: {error!r}")
        unreadable.__cause__ = error
        return RankResult(rank.rank, None, unreadable, exitcode)
    problem: Exception | None = None
    if expired_s is not None:
        lingered = f"fn returned on rank {rank.rank}, but its process did not end within {expired_s} s and was ended"
        problem = too_late(rank, lingered)
    elif exitcode != 0:
        problem = MoEEpError(f"fn returned on rank {rank.rank}, but then its process {rank.how_it_ended()}")
    return RankResult(rank.rank, value, problem, exitcode)


def too_late(rank: RankProcess, what: str) -> MoEEpTimeoutError:
    """The error of a rank that ran out of time, with where it stood then."""
    return MoEEpTimeoutError(f"{what}\n{rank.where_it_stood()}", ranks=[rank.rank])


def rebuild(rank: int, reply: Reply, body: Buffer) -> Exception:
    """The exception that a rank raised, or one that carries its text."""
    try:
        error = pickle.loads(body) if len(body) else None
    except Exception:
        error = None
    if not isinstance(error, Exception):
        error = MoEEpError(f"rank {rank} raised {reply.summary}")
    error.__cause__ = RankTraceback(reply.traceback)
    return error


def raise_if_unusable(rank: int, reply: Reply, body: Buffer) -> None:
    """Raise the config error of a rank that could not load the script, fn or an argument."""
    if reply.said is not Said.UNUSABLE:
        return
    error = rebuild(rank, reply, body)
    if isinstance(error, MoEEpConfigError):
        raise error
    raise config_error(
        f"rank {rank}",
        f"{reply.summary} while it loaded the script, fn or an argument",
        "what a new interpreter can import",
        "put functions and classes into a file, not into a notebook or an interactive session",
    ) from error
