"""Many random rounds, each a plan that follows from the seed and its number; what was seen is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import config_error
from .crew import warm_nursery
from .plan import random_plan
from .report import RoundReport
from .supervisor import new_store, run_round


def run_rounds(
    seed: int,
    rounds: int,
    world: int = 4,
    timeout_ms: int = 500,
    transport: str = "shm",
    state: Path | None = None,
    done: Callable[[int, RoundReport], None] = lambda number, report: None,
) -> list[dict[str, Any]]:
    """Rounds 0 to ``rounds - 1`` of this seed, as JSON values.

    Args:
        state: a file with a line for each round done; those in it are not run again.
        done: called after each round that was run.

    Raises:
        MoEEpConfigError: the file belongs to another run.
    """
    name = {"seed": seed, "world": world, "timeout_ms": timeout_ms, "transport": transport}
    found = _read(state, name)
    left = [number for number in range(rounds) if number not in found]
    if left:
        with closing(warm_nursery()) as nursery:
            store = new_store()
            for number in left:
                plan = random_plan(seed, number, world, timeout_ms, transport)
                report = run_round(nursery, store, f"round-{number}", plan)
                found[number] = {"number": number, **report.as_json()}
                if state is not None:
                    with state.open("a") as lines:
                        lines.write(json.dumps(found[number]) + "\n")
                done(number, report)
    return [found[number] for number in range(rounds)]


def _read(state: Path | None, name: dict[str, Any]) -> dict[int, dict[str, Any]]:
    if state is None:
        return {}
    if not state.exists():
        state.write_text(json.dumps(name) + "\n")
        return {}
    text = state.read_text()
    if not text.endswith("\n"):  # the run was ended while it wrote
        state.write_text(text + "\n")
    head, *lines = text.splitlines()
    if json.loads(head) != name:
        raise config_error(
            "--state", f"{state} of a run with {head}", f"one of {json.dumps(name)}", "name another file"
        )
    rounds = []
    for line in lines:
        try:
            rounds.append(json.loads(line))
        except ValueError:
            continue
    return {each["number"]: each for each in rounds}
