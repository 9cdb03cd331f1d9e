"""The host's view of a Fleet's steps: which are open, and which output set each one has.

Numbers live on the GPU (see the kernels); what is counted here only tells open steps apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import config_error
from ...substrate.control import SETS

_FREE = 0


class Steps:
    """At most two steps are dispatched and not yet combined.

    Args:
        give_up: called with an open step's slot, or ``None`` for the next step, to take part without rows; and with
            what the peers are told.
    """

    def __init__(self, give_up: Callable[[Any, BaseException | str], None]) -> None:
        self._give_up = give_up
        self._begun = 0
        self._taken_by = [_FREE] * SETS
        self._slots: list[Any] = [None] * SETS

    @property
    def open(self) -> list[int]:
        """Steps dispatched and not yet combined."""
        return sorted(step for step in self._taken_by if step != _FREE)

    @property
    def open_slots(self) -> list[Any]:
        """The slots of open steps whose dispatch was launched."""
        return [slot for slot in self._slots if slot is not None]

    @property
    def _blocked(self) -> bool:
        """Whether the next step's buffer set is still taken."""
        return self._begun >= SETS and self._begun + 1 - SETS in self._taken_by

    def begin(self) -> int:
        """Open the next step.

        Raises:
            MoEEpConfigError: the step before last is still open; nothing is lost.
        """
        if self._blocked:
            raise config_error(
                "dispatch",
                f"a step while step {self._begun + 1 - SETS} of {self._begun} is not combined",
                f"at most {SETS} steps dispatched and not yet combined",
                "combine (or destroy the handle of) the older one first",
            )
        self._begun += 1
        self._taken_by[self._taken_by.index(_FREE)] = self._begun
        return self._begun

    def output_of(self, step: int) -> int:
        """Index of an open step's output set."""
        return self._taken_by.index(step)

    def sent(self, index: int, slot: object) -> None:
        """The dispatch of the step with output set ``index`` was launched with this slot."""
        self._slots[index] = slot

    def close(self, step: int) -> None:
        """The step went well."""
        index = self._taken_by.index(step)
        self._taken_by[index], self._slots[index] = _FREE, None

    def fail(self, step: int, error: BaseException | str) -> None:
        """Give an open step up; the peers are told."""
        if step not in self._taken_by:
            return
        self._give_up(self._slots[self._taken_by.index(step)], error)
        self.close(step)

    def fail_next(self, error: BaseException) -> None:
        """Give up the step that was about to begin; the peers are told."""
        if not self._blocked:
            self._give_up(None, error)
            self._begun += 1
