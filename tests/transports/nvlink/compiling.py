"""Compile every kernel for a Hopper GPU on a machine without one; run as a script, since Triton chooses early.

The interpreter accepts what the compiler does not, such as values of two types where branches meet.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moefleet.config import EpAlgorithm, EpLayout, FleetParams
from moefleet.knobs import FleetAlgoKnob, FleetAlgoKnobQuantization
from moefleet.placement import Placement
from moefleet.transports.nvlink import launch
from moefleet.transports.nvlink.engine import Engine, Grids
from moefleet.transports.nvlink.geometry import Geometry

WORLD, EXPERTS, TOKENS, HIDDEN, TOPK = 2, 6, 3, 16, 2


class NoDriver:
    """What Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def engine_for(
    layout: EpLayout, count: bool, knobs: tuple[FleetAlgoKnob, ...] = (), tolerant: bool = False, **changes: int
) -> Engine:
    high = layout is EpLayout.FLAT
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if high else EpAlgorithm.LOW_LATENCY
    fields = {"token_hidden_size": HIDDEN, "max_topk": TOPK, **changes}
    params = FleetParams(EXPERTS, TOKENS, algorithm=algorithm, layout=layout, **fields)
    geometry = Geometry.of(params, Placement.contiguous(EXPERTS, WORLD), 1, knobs)
    grids = Grids(4, 2 if high else 4, 4)
    engine = Engine(
        geometry, torch.device("cpu"), [0] * WORLD, grids, grids, 1.0, count, tolerant=tolerant, renormalize=tolerant
    )
    engine._early = True
    return engine


def compile_low_precision(layout: EpLayout) -> None:
    """Dispatch of tokens that it encodes, by an instruction and without it, and of fp8 rows with scales."""
    engine = engine_for(layout, False, (FleetAlgoKnobQuantization(frozenset({"FP8E4M3"})),), token_hidden_size=300)
    for native in (True, False):
        engine._native = native
        x = torch.zeros(TOKENS, 300, dtype=torch.bfloat16)
        engine.bind_dispatch(engine.take_slot(), x, TOPK, engine.outputs[0])
    engine = engine_for(layout, False, token_hidden_size=300, dtype_bytes=1, scale_bytes_per_token=12)
    x, scales = torch.zeros(TOKENS, 300).to(torch.float8_e4m3fn), torch.zeros(TOKENS, 3)
    engine.bind_dispatch(engine.take_slot(), x, TOPK, engine.outputs[0], scales=scales)


def compile_all(layout: EpLayout, count: bool, tolerant: bool) -> None:
    engine = engine_for(layout, count, tolerant=tolerant)
    slot, output = engine.take_slot(), engine.outputs[0]
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    rows = output.rows.view(torch.bfloat16).view(-1, HIDDEN)
    engine.bind_update(slot, torch.zeros(TOKENS, TOPK, dtype=torch.int64), torch.zeros(TOKENS, TOPK))
    engine.bind_dispatch(slot, x, TOPK, output)
    engine.bind_combine(slot, rows, x, TOPK)
    engine.fail(slot, 0, fresh=True)
    engine.depart(0)
    engine.expect(slot, 7, 0)


def compile_halves(layout: EpLayout) -> None:
    engine = engine_for(layout, False)
    slot, output = engine.take_slot(), engine.outputs[0]
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    rows = output.rows.view(torch.bfloat16).view(-1, HIDDEN)
    for send in (True, False):
        engine.bind_dispatch(slot, x, TOPK, output, send, not send, staged=True)
        engine.bind_combine(slot, rows, x, TOPK, send, not send, staged=True)


def nothing(*args: Any) -> Any:
    """In place of what binds a compiled kernel, which asks a GPU for room."""
    return lambda *args: None


if __name__ == "__main__":
    driver.set_active(NoDriver())
    launch._Bound = nothing  # type: ignore[misc,assignment]
    for name in sys.argv[1:]:
        for tolerant in (False, True):
            compile_all(EpLayout[name], count=name != "RANK_MAJOR", tolerant=tolerant)
        compile_halves(EpLayout[name])
        compile_low_precision(EpLayout[name])
        print(name, "compiles")
