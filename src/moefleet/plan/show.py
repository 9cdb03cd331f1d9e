"""A plan on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .advice import Advice
from .fit import Fit
from .planning import LayoutPlan, Plan, RankShare
from .words import in_bytes, in_count, in_ranks, in_rows


def show(console: Console, plan: Plan) -> None:
    """Print the model, weights, what crosses, memory, advice and warnings."""
    console.print(headline(plan))
    console.print(weights_table(plan))
    console.print(traffic_table(plan))
    console.print(fits_table(plan))
    console.print(Text("\nmax_tokens_per_rank (M)", "bold"))
    console.print(advice_list(plan))
    for layout in plan.layouts[:1]:
        console.print(
            Text.assemble("\n", ("For example", "bold"), "\n  ", (fleet_call(layout), "cyan")), soft_wrap=True
        )
    console.print()
    for warning in plan.warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), (warning, "yellow")))
    for note in plan.notes:
        console.print(Text(note, "dim"))


def headline(plan: Plan) -> Text:
    """The model in a line or two."""
    shape = plan.shape
    total = shape.experts * shape.moe_layers * shape.expert_parameters
    text = Text.assemble(
        (shape.name, "bold"),
        f" on {plan.world_size} rank{'s' * (plan.world_size > 1)}: {shape.experts} experts, top-{shape.topk}, "
        f"hidden {shape.hidden}, expert intermediate {shape.intermediate}, {shape.dtype}; "
        f"{shape.moe_layers} of {shape.layers} layers are MoE. {in_count(total)} parameters in experts",
    )
    if shape.dense_parameters is not None:
        text.append(f", about {in_count(shape.dense_parameters)} in all else")
    return text.append(".")


def weights_table(plan: Plan) -> Table:
    """Ranks that hold as many experts and as many bytes share a line."""
    where = "as stored" if plan.weights_from == "checkpoint" else f"as {plan.shape.dtype}"
    table = _table(f"Weights on each rank, {where}")
    for name in ("rank", "experts of a layer", "expert weights", "dense weights", "together"):
        table.add_column(name, justify="left" if name in ("rank", "experts of a layer") else "right")
    for group in _alike(plan.ranks):
        first, last = group[0], group[-1]
        each = "" if len(group) == 1 else " each"
        held = f"{first.count}{each}: {first.first}-{last.first + last.count - 1}" if first.count else "none"
        table.add_row(
            in_ranks(first.rank, last.rank),
            held,
            in_bytes(first.expert_bytes),
            "unknown" if first.dense_bytes is None else in_bytes(first.dense_bytes),
            in_bytes(first.total_bytes),
        )
    return table


def traffic_table(plan: Plan) -> Table:
    """What a rank sends and gets in one step of one layer, and over all layers."""
    table = _table("A step with M tokens on every rank: expected for uniform routing, mean over ranks")
    for name in ("layout", "M", "rows to a peer", "dispatch sends", "combine sends", "all layers", "rows received"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for each in plan.layouts:
        flow = each.traffic
        table.add_row(
            each.params.resolved_layout.value,
            str(each.params.max_tokens_per_rank),
            in_rows(flow.rows_to_each),
            in_bytes(flow.dispatch_bytes),
            in_bytes(flow.combine_bytes),
            in_bytes(plan.shape.moe_layers * (flow.dispatch_bytes + flow.combine_bytes)),
            in_rows(flow.received_rows),
        )
    fewer = plan.layouts[0].traffic.times_fewer if plan.layouts else 1.0
    if fewer > 1.005:
        table.caption = f"A token crosses to a rank once: {fewer:.2f} times fewer rows than one for each chosen expert."
        table.caption_justify = "left"
    return table


def fits_table(plan: Plan) -> Table:
    """Every transport in every layout: memory, and whether it fits."""
    table = _table("Fleet memory on each rank, and which transports fit")
    for name in ("layout", "transport", "on", "at start", "at most", "fits"):
        table.add_column(name, justify="right" if name.startswith("at") else "left", overflow="fold")
    for each in plan.layouts:
        for number, one in enumerate(each.fits):
            taken, most = ("", "") if one.memory is None else map(in_bytes, (one.memory.at_start, one.memory.at_most))
            layout = "" if number else each.params.resolved_layout.value
            device = {"cpu": "CPU", "cuda": "GPU"}[one.device_type]
            table.add_row(layout, Text(one.transport), device, taken, most, verdict(one))
        table.add_section()
    return table


def verdict(one: Fit) -> Text:
    """Yes, yes but not here, or no, with the reason."""
    if not one.fits:
        return Text.assemble(("no: ", "red"), one.reason)
    return Text("yes", "green") if one.here else Text.assemble(("yes, but not here: ", "yellow"), one.reason)


def advice_list(plan: Plan) -> Table:
    """What is proposed, and why; layouts with the same proposal share a line."""
    table = Table.grid(padding=(0, 2))
    said: dict[tuple[str, int], Advice] = {}
    for each in plan.advice:
        said.setdefault((each.purpose, each.tokens), each)
    for each in said.values():
        alike = [
            other.layout.value for other in plan.advice if (other.purpose, other.tokens) == (each.purpose, each.tokens)
        ]
        table.add_row(
            Text(f"  {each.purpose}", "bold"),
            Text(str(each.tokens), "green"),
            Text.assemble((", ".join(alike), "cyan"), f": {each.reason}"),
        )
    return table


def fleet_call(each: LayoutPlan) -> str:
    """The Python that builds these parameters, on one line."""
    p = each.params
    return (
        f"FleetParams(num_experts={p.num_experts}, max_tokens_per_rank={p.max_tokens_per_rank}, "
        f"token_hidden_size={p.token_hidden_size}, dtype_bytes={p.dtype_bytes}, algorithm={p.algorithm}, "
        f"layout={p.resolved_layout}, max_topk={p.max_topk})"
    )


def _alike(ranks: tuple[RankShare, ...]) -> Iterator[list[RankShare]]:
    for _, group in groupby(ranks, key=lambda rank: (rank.count, rank.expert_bytes)):
        yield list(group)


def _table(title: str) -> Table:
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
