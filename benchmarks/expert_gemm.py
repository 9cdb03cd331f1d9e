"""Time the three ways of :mod:`moefleet.kernels.grouped_gemm` to multiply experts' rows, and whole kernel calls.

    python benchmarks/expert_gemm.py                  # the table behind the kernel's rule, on this machine
    python benchmarks/expert_gemm.py --calls          # one kernel call per layout at decode sizes

Medians in microseconds; the candidates of a line alternate. "gathered" starts from and ends at rows sorted by expert,
as RANK_MAJOR and FLAT do; "in place" reads and writes padded blocks, as EXPERT_MAJOR does. "helper" is the one call of
the compiled helper, for float32 only. A ratio above 1 says that grouped_mm is faster than torch.mm for each expert, or
the helper faster than grouped_mm.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch

from moefleet.config import EpLayout, GroupedGemmConfig
from moefleet.kernels import get_kernel
from moefleet.kernels.few_rows import FewRows
from moefleet.kernels.grouped_gemm import ACTIVATIONS, each_expert, grouped_experts
from moefleet.tensors import DispatchOutput
from moefleet.weights import UnquantizedMoEWeights

SHAPES = ((128, 96), (512, 256), (2048, 768))
SILU = ACTIVATIONS["silu"]


def medians(candidates: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median microseconds of each candidate, called in turn for ``seconds`` in all and at least five times."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def make_weights(experts: int, hidden: int, inter: int, dtype: torch.dtype) -> UnquantizedMoEWeights:
    w13 = torch.randn(experts, 2 * inter, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, inter) / inter**0.5
    return UnquantizedMoEWeights(w13.to(dtype), w2.to(dtype))


def strategies(experts: int, rows: int, weights: UnquantizedMoEWeights) -> dict[str, Callable[[], object]]:
    """Both ways over the same ``rows`` per expert, gathered and in place (blocks twice as large as their content)."""
    hidden, dtype = weights.w13.shape[2], weights.w13.dtype
    blocks = torch.randn(experts, 2 * rows, hidden).to(dtype)
    results = torch.empty_like(blocks)
    x = torch.randn(experts * rows, hidden).to(dtype)
    counts = torch.full((experts,), rows, dtype=torch.int32)

    def gathered_each() -> None:
        sizes = counts.tolist()
        each_expert(x.split(sizes), weights, SILU, torch.empty_like(x).split(sizes))

    def gathered_grouped() -> None:
        grouped_experts(x, weights, SILU, counts.cumsum(0, dtype=torch.int32))

    def fronts(planes: torch.Tensor) -> list[torch.Tensor]:
        return [plane[:size] for plane, size in zip(planes, counts.tolist(), strict=True)]

    def in_place_each() -> None:
        each_expert(fronts(blocks), weights, SILU, fronts(results))

    def in_place_grouped() -> None:
        y = grouped_experts(torch.cat(fronts(blocks)), weights, SILU, counts.cumsum(0, dtype=torch.int32))
        for target, part in zip(fronts(results), y.split(counts.tolist()), strict=True):
            target.copy_(part)

    flat = DispatchOutput(
        x,
        torch.arange(experts).repeat_interleave(rows)[:, None],
        torch.ones(len(x), 1),
        recv_total_counter=torch.tensor([len(x)], dtype=torch.int32),
    )
    padded, y, few = DispatchOutput(blocks, expert_counts=counts), torch.empty_like(x), FewRows.of(GroupedGemmConfig())

    def gathered_helper() -> None:
        few and few.compute(flat, weights, y, len(x))

    def in_place_helper() -> None:
        few and few.compute(padded, weights, results, len(x))

    ways = gathered_each, gathered_grouped, gathered_helper, in_place_each, in_place_grouped, in_place_helper
    return {f.__name__: f for f in ways if dtype is torch.float32 or "helper" not in f.__name__}


def strategy_table(args: argparse.Namespace) -> Iterator[str]:
    columns = " mm | grouped_mm | ratio | helper | ratio |"
    yield "|    H |    I | dtype    |  L | rows | gathered" + columns + " in place" + columns
    yield "| ---: | ---: | -------- | -: | ---: " + "| ----------: | ---------: | ----: | -----: | ----: " * 2 + "|"
    for (hidden, inter), dtype, experts, rows in product(SHAPES, args.dtypes, args.experts, args.rows):
        if experts * rows * hidden * inter > args.largest:
            continue
        took = medians(strategies(experts, rows, make_weights(experts, hidden, inter, dtype)), args.seconds)
        line = f"| {hidden:4} | {inter:4} | {str(dtype)[6:]:8} | {experts:2} | {rows:4} "
        for way in ("gathered", "in_place"):
            each, grouped, helper = (took.get(f"{way}_{name}", math.nan) for name in ("each", "grouped", "helper"))
            line += (
                f"| {each:11.1f} | {grouped:10.1f} | {each / grouped:5.2f} | {helper:6.1f} | {grouped / helper:5.2f} "
            )
        yield line + "|"


def received(layout: EpLayout, tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> DispatchOutput:
    """``tokens`` rows, each for two local experts, as one of two sources sent them; room for 16 from each."""
    pairs = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 1) % experts], 1)
    if layout is EpLayout.EXPERT_MAJOR:
        counts = torch.bincount(pairs.flatten(), minlength=experts).int()
        return DispatchOutput(torch.randn(experts, 32, hidden).to(dtype), expert_counts=counts)
    rows, ids, weights = torch.randn(2, 16, hidden).to(dtype), torch.full((2, 16, 2), -1), torch.zeros(2, 16, 2)
    ids[0, :tokens], weights[0, :tokens] = pairs, 0.5
    if layout is EpLayout.RANK_MAJOR:
        return DispatchOutput(rows, ids, weights, torch.tensor([tokens, 0], dtype=torch.int32))
    total = torch.tensor([tokens], dtype=torch.int32)
    return DispatchOutput(rows.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1), recv_total_counter=total)


def call_table(args: argparse.Namespace) -> Iterator[str]:
    yield "|    H |    I | dtype    |  L | tokens | EXPERT_MAJOR | RANK_MAJOR |   FLAT |"
    yield "| ---: | ---: | -------- | -: | -----: | -----------: | ---------: | -----: |"
    kernel, experts = get_kernel("grouped_gemm"), 4
    for (hidden, inter), dtype, tokens in product(SHAPES, args.dtypes, (1, 2, 4, 8)):
        weights = make_weights(experts, hidden, inter, dtype)
        calls = {}
        for layout in EpLayout:
            out = received(layout, tokens, experts, hidden, dtype)
            into = torch.empty_like(out.expert_tensors)
            calls[layout.name] = lambda o=out, ly=layout, w=weights, i=into: kernel.compute(o, ly, w, into=i)
        em, rm, flat = medians(calls, args.seconds).values()
        yield (
            f"| {hidden:4} | {inter:4} | {str(dtype)[6:]:8} | {experts:2} | {tokens:6} "
            f"| {em:12.1f} | {rm:10.1f} | {flat:6.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="time kernel calls instead of the two strategies")
    parser.add_argument("--threads", type=int, default=1, help="torch's intra-op threads (default 1)")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 16], metavar="L")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 128], help="rows per expert")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each line (default 0.5)")
    parser.add_argument("--largest", type=float, default=2e9, help="skip lines with more than this many L*rows*H*I")
    args = parser.parse_args()
    args.dtypes = [getattr(torch, name) for name in args.dtypes]
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {args.threads} thread(s)")
    for line in (call_table if args.calls else strategy_table)(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
