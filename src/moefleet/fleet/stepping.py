"""What transports that number their steps share: the window of open steps, and the words for what a peer did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..errors import MoEEpError, MoEEpPeerError, config_error
from ..substrate.control import SETS, Operation
from ..substrate.rowtypes import code_name


class StepWindow:
    """Numbers a Fleet's steps and keeps at most ``SETS`` of them open."""

    def __init__(self) -> None:
        self.last = 0
        self._open: set[int] = set()

    @property
    def blocked(self) -> bool:
        """Whether the next step's place is still taken by an open step."""
        return self.last + 1 - SETS in self._open

    @property
    def open_steps(self) -> list[int]:
        """Steps begun and not yet ended, oldest first."""
        return sorted(self._open)

    def is_open(self, step: int) -> bool:
        return step in self._open

    def open_next(self) -> int:
        """Open the next step.

        Raises:
            MoEEpConfigError: the step before last is still open; nothing is lost.
        """
        step = self.last + 1
        if self.blocked:
            raise config_error(
                "dispatch",
                f"step {step} while step {step - SETS} is not combined",
                f"at most {SETS} steps dispatched and not yet combined",
                "combine (or destroy the handle of) the older one first",
            )
        self.last = step
        self._open.add(step)
        return step

    def end(self, step: int) -> None:
        self._open.discard(step)


def blame(error: BaseException | str, rank: int) -> tuple[int, str]:
    """Whose mistake an error on ``rank`` was, and its text: what is passed on to the peers."""
    if isinstance(error, str):
        return rank, error
    if isinstance(error, MoEEpPeerError) and error.rank >= 0:
        return error.rank, error.reason or str(error)
    return rank, str(error) if isinstance(error, MoEEpError) else describe(error)


def describe(error: BaseException) -> str:
    """Type and text of an error."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def step_failed(origin: int, step: int, operation: Operation, reason: str) -> MoEEpPeerError:
    """The error of a rank whose peer gave the step up."""
    return MoEEpPeerError(
        f"rank {origin} failed in step {step}, {operation.name.lower()}: {reason}", rank=origin, reason=reason
    )


class Brought(Protocol):
    """What a rank says of the rows that it brings to a step."""

    @property
    def step(self) -> int: ...

    @property
    def topk(self) -> int: ...

    @property
    def dtype(self) -> int: ...


def check_same(brought: Sequence[Brought], rank: int, code: int) -> None:
    """Raise MoEEpPeerError unless all ranks bring rows of one type (``code`` is this rank's) and the same K."""
    topk = brought[rank].topk
    for peer, each in enumerate(brought):
        if each.topk == topk and each.dtype == code:
            continue
        theirs = f"K = {each.topk} and {code_name(each.dtype)}"
        raise MoEEpPeerError(
            f"rank {peer} brought {theirs} to step {each.step}, this rank K = {topk} and {code_name(code)}; "
            "a step has one K and one row type",
            rank=peer,
            reason=theirs,
        )
