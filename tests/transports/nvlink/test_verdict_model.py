"""The verdict of ``kernels/judging.py`` in all interleavings: programs of one launch, one peer whose flag may come.

The interpreter runs programs one after the other, so what they do beside each other is checked on this model of it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

PRESENT, ABSENT, OPEN = 1, 0, -1


class State(NamedTuple):
    """``at``: where each program stands, or what it went on with; ``may``: whether program 0 saw all checked in."""

    flag: bool
    stuck: int
    verdict: int
    may: bool
    at: tuple[str, ...]


def moves(state: State, *, all_check_in: bool, compare: bool) -> list[State]:
    """What may happen next: the flag comes, or a program takes a step, each of one access to shared memory."""
    found = [] if state.flag else [state._replace(flag=True)]
    for program, where in enumerate(state.at):

        def go(to: str, program: int = program, **changes: object) -> None:
            at = (*state.at[:program], to, *state.at[program + 1 :])
            found.append(state._replace(at=at, **changes))

        judge = program == 0
        if where == "look soon":
            go("present" if state.flag else "check in")
        elif where == "check in":
            go("read verdict", stuck=state.stuck + 1)
        elif where == "read verdict":
            go({PRESENT: "present", ABSENT: "absent", OPEN: "poll"}[state.verdict])
        elif where == "poll":
            go("propose present" if state.flag else "count" if judge else "read verdict")
        elif where == "count":
            go("poll again", may=state.stuck == len(state.at) or not all_check_in)
        elif where == "poll again":
            go("propose absent" if state.may and not state.flag else "read verdict")
        elif where in ("propose present", "propose absent"):
            mine = PRESENT if where == "propose present" else ABSENT
            verdict = mine if state.verdict == OPEN or not compare else state.verdict
            go("present" if verdict == PRESENT else "absent", verdict=verdict)
    return found


def disagreements(programs: int, *, all_check_in: bool = True, compare: bool = True) -> tuple[int, int]:
    """How many states there are, and in how many two programs have gone on with different answers."""
    first = State(False, 0, OPEN, False, ("look soon",) * programs)
    seen, todo = {first}, [first]
    while todo:
        for state in moves(todo.pop(), all_check_in=all_check_in, compare=compare):
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return len(seen), sum({"present", "absent"} <= set(state.at) for state in seen)


@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_all_programs_go_on_with_one_answer(programs: int) -> None:
    states, wrong = disagreements(programs)
    assert states > 10 * programs and wrong == 0


def test_mistakes_are_found() -> None:
    assert disagreements(2, all_check_in=False)[1] > 0, "somebody went on before the rank was left out"
    assert disagreements(3, compare=False)[1] > 0, "a verdict was changed"
