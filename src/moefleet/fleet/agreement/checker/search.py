"""Depth-first search through all states of a model, and the shortest way to a violation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Violation(Exception):
    """A property does not hold.

    Attributes:
        prop: the property's letter.
        message: what happened.
        trace: the moves that lead there from a start, once known.
    """

    def __init__(self, prop: str, message: str) -> None:
        self.prop, self.message = prop, message
        self.trace: tuple[str, ...] = ()
        super().__init__(f"({prop}) {message}")


class Model(Protocol[S]):
    """What can be searched. Properties are checked in ``successors``, which raises :class:`Violation`."""

    def successors(self, state: S) -> Sequence[S]: ...

    def labels(self, state: S) -> Sequence[str]:
        """What each of ``successors(state)`` does, in words."""
        ...


@dataclass(frozen=True)
class Counts:
    """How much was searched."""

    states: int
    transitions: int
    seconds: float

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.states + other.states, self.transitions + other.transitions, self.seconds + other.seconds)


def search(model: Model[S], start: S, tick: Callable[[int], None] = lambda states: None) -> Counts:
    """Visit every reachable state once. Raises the first :class:`Violation` found, with the shortest trace to one.

    Args:
        model: what to search.
        start: where from.
        tick: called now and then, and at the end, with the number of states so far.
    """
    began = time.perf_counter()
    todo, seen = [start], {start}
    add, push, pop, successors = seen.add, todo.append, todo.pop, model.successors
    transitions, next_tick = 0, 100_000
    try:
        while todo:
            found = successors(pop())
            transitions += len(found)
            for state in found:
                if state not in seen:
                    add(state)
                    push(state)
            if len(seen) >= next_tick:
                tick(len(seen))
                next_tick = len(seen) + 100_000
    except Violation as violation:
        raise shortest(model, start) or violation from None
    tick(len(seen))
    return Counts(len(seen), transitions, time.perf_counter() - began)


def shortest(model: Model[S], start: S) -> Violation | None:
    """The violation that the fewest moves lead to, by breadth-first search."""
    came: dict[S, tuple[S, int] | None] = {start: None}
    todo: deque[S] = deque([start])
    while todo:
        state = todo.popleft()
        try:
            found = model.successors(state)
        except Violation as violation:
            violation.trace = _trace(model, came, state)
            return violation
        for index, other in enumerate(found):
            if other not in came:
                came[other] = (state, index)
                todo.append(other)
    return None


def _trace(model: Model[S], came: dict[S, tuple[S, int] | None], state: S) -> tuple[str, ...]:
    words: list[str] = []
    at = came[state]
    while at is not None:
        before, index = at
        words.append(model.labels(before)[index])
        at = came[before]
    return tuple(reversed(words))
