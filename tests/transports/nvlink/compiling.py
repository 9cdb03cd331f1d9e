"""Compile every kernel for a Hopper GPU on a machine without one; run as a script, since Triton chooses early.

The interpreter accepts what the compiler does not, such as values of two types where branches meet. That is found by
the front end, which every variant passes. Of each layout the variants that have every branch go on to machine code:
layouts, shared memory and assembler are checked there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton import knobs as triton_knobs
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
    """Dispatch of tokens that it encodes by an instruction, and of fp8 rows with scales."""
    compile_encoding(layout, native=True)
    engine = engine_for(layout, False, token_hidden_size=300, dtype_bytes=1, scale_bytes_per_token=12)
    x, scales = torch.zeros(TOKENS, 300).to(torch.float8_e4m3fn), torch.zeros(TOKENS, 3)
    engine.bind_dispatch(engine.take_slot(), x, TOPK, engine.outputs[0], scales=scales)


def compile_encoding(layout: EpLayout, native: bool) -> None:
    """Dispatch of tokens that it encodes, by an instruction or without it."""
    engine = engine_for(layout, False, (FleetAlgoKnobQuantization(frozenset({"FP8E4M3"})),), token_hidden_size=300)
    engine._native = native
    x = torch.zeros(TOKENS, 300, dtype=torch.bfloat16)
    engine.bind_dispatch(engine.take_slot(), x, TOPK, engine.outputs[0])


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


@contextlib.contextmanager
def front_end_only() -> Iterator[None]:
    """Compile to Triton's own intermediate language, which is kept as what was compiled: last, therefore."""

    def stop_early(backend: Any, stages: dict[str, Any], *_: Any) -> None:
        to_ttir = stages["ttir"]
        stages.clear()
        stages["ttir"] = to_ttir
        stages["cubin"] = lambda module, metadata: metadata.update(name="", shared=0) or b""

    triton_knobs.runtime.add_stages_inspection_hook = stop_early
    try:
        yield
    finally:
        triton_knobs.runtime.add_stages_inspection_hook = None


def bound(compiled: Any, *args: Any) -> Any:
    """In place of what binds a compiled kernel, which asks a GPU for room."""
    assert compiled.kernel or triton_knobs.runtime.add_stages_inspection_hook, "only the front end has seen this kernel"
    return lambda *args: None


if __name__ == "__main__":
    driver.set_active(NoDriver())
    launch._Bound = bound  # type: ignore[misc,assignment]
    for native in (True, False):
        compile_encoding(EpLayout.EXPERT_MAJOR, native)
    print("encoding compiles")
    for name in sys.argv[1:]:
        layout, count = EpLayout[name], name != "RANK_MAJOR"
        compile_all(layout, count, tolerant=True)
        with front_end_only():
            compile_all(layout, count, tolerant=False)
            compile_halves(layout)
            compile_low_precision(layout)
        print(name, "compiles")
