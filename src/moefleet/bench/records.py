"""What a run says to machines: one record for each phase of each candidate in each case."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .._version import __version__
from ..launch.pool import usable_cores

Seconds = Mapping[str, Mapping[str, npt.NDArray[np.float64]]]
"""Per candidate and phase: the time of each step, ``[steps]``."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One phase of one candidate in one case.

    Attributes:
        what: ``comm``, ``layer`` or ``model``.
        transport: its name; or ``gloo-raw`` or ``transformers``, which are measured again in every case.
        world, tokens: ``W`` ranks and ``T`` of each.
        phase: of a step; the last one named in a case's ``phases`` is the whole.
        median_us, p99_us: over the timed steps, of the slowest rank in each.
        ratio_to_first: ``median_us`` divided by that of the first candidate of this case with this phase.
        steps: timed steps in all, from ``rounds`` turns of this candidate, each after ``warmup`` untimed ones.
        valid: whether its output agreed with the reference; ``None`` where nobody looked.
        device: ``cpu`` or ``cuda``, where each rank has a GPU.
        host: what it ran on.
    """

    what: str
    transport: str
    layout: str
    world: int
    tokens: int
    phase: str
    median_us: float
    p99_us: float
    ratio_to_first: float
    dtype: str
    steps: int
    rounds: int
    warmup: int
    threads: int
    valid: bool | None
    device: str
    host: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CommRecord(Record):
    """One phase of a step without experts' work: ``dispatch`` (with the handle's update), ``combine`` or ``both``.

    Attributes:
        bytes: rows that a rank sends to other ranks, one for each (token, rank that serves it), mean over ranks;
            ``bytes_busiest_rank`` the most that one rank sends.
        ratio_to_gloo_raw: as ``ratio_to_first`` against gloo-raw; ``None`` where that did not run.
    """

    bytes: int
    bytes_busiest_rank: int
    ratio_to_gloo_raw: float | None
    hidden: int
    experts: int
    topk: int
    routing: str
    combine_input: str


@dataclass(frozen=True, kw_only=True)
class LayerRecord(Record):
    """One phase of a whole layer: ``route``, ``dispatch``, ``compute``, ``combine`` or ``total``.

    Attributes:
        model: whose sizes these are, and how they were scaled down.
    """

    model: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    routing: str


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """One phase of generating text with a whole model.

    ``run`` is the whole generation, ``prefill`` its first forward, ``decode`` each later one. Of the ranks there are
    also ``route``, ``dispatch``, ``compute`` and ``combine``, all blocks of a decode step together, and ``rest``, which
    is what is left of it: attention, norms, the next token. These are means over ranks, of further runs.

    Attributes:
        tokens: sequences of each rank.
        batch: sequences of all ranks together.
        alone_threads: of the unmodified model's process.
        tokens_per_second: new tokens of all sequences, of ``run`` and ``decode``; ``None`` for other phases.
    """

    model: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    alone_threads: int
    tokens_per_second: float | None


KINDS: dict[str, type[Record]] = {"comm": CommRecord, "layer": LayerRecord, "model": ModelRecord}
R = TypeVar("R", bound=Record)


def build(
    kind: type[R],
    facts: Mapping[str, Any],
    seconds: Seconds,
    valid: Mapping[str, bool],
    more: Callable[[str, str, float], dict[str, Any]] = lambda name, phase, median_us: {},
) -> list[R]:
    """All records of one case, candidate by candidate, the first one first.

    Args:
        facts: the fields that were decided before anything was measured.
        valid: of the candidates whose output was compared.
        more: from a candidate, a phase and its median the fields that only this kind has.
    """
    medians = {name: {phase: _us(np.median(of), 4) for phase, of in phases.items()} for name, phases in seconds.items()}
    first: dict[str, float] = {}
    for phases in medians.values():
        first = phases | first
    return [
        kind(
            **{**facts, "steps": len(of)},
            transport=name,
            phase=phase,
            median_us=round(medians[name][phase], 2),
            p99_us=_us(np.percentile(of, 99), 2),
            ratio_to_first=round(medians[name][phase] / first[phase], 4),
            valid=valid.get(name),
            host=host(facts["device"]),
            **more(name, phase, medians[name][phase]),
        )
        for name, phases in seconds.items()
        for phase, of in phases.items()
    ]


def _us(seconds: Any, digits: int) -> float:
    return round(float(seconds) * 1e6, digits)


@cache
def host(device: str = "cpu") -> dict[str, Any]:
    """The machine and the software, and when this process began to measure."""
    gpu = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()} if device == "cuda" else {}
    return {
        **gpu,
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moefleet": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()


def record_of(fields: Mapping[str, Any]) -> Record:
    """The record that ``asdict`` made a dict of.

    Raises:
        KeyError, TypeError: it is none.
    """
    return KINDS[fields["what"]](**fields)


def to_json(found: Iterable[Record]) -> str:
    """A JSON list of objects, one for each record."""
    return json.dumps([asdict(record) for record in found], indent=2) + "\n"
