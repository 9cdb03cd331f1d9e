"""The demo's report on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text as Line

from .report import TOLERANCE, Report, Text


def show(console: Console, report: Report) -> None:
    """Print texts, load, speed and whether all of it is right."""
    world = len(report.rows_of_rank)
    for text in report.texts:
        console.print()
        console.print(Line(f"rank {text.rank}", "cyan"))
        console.print(Line.assemble((printable(text.prompt), "dim"), (printable(text.continuation), "bold")))
    idle = [rank for rank in range(world) if rank not in {text.rank for text in report.texts}]
    if idle:
        console.print(Line(f"\n{ranks_in_words(idle)} no text: the experts there work for the others", "cyan"))
    console.print(f"\n[bold]Expert load[/]: token rows computed by each rank's experts, over {report.transport}")
    console.print(load_table(report))
    console.print(
        f"\n{report.tokens} new tokens on {world} rank{'s' * (world > 1)} in {report.seconds:.1f} s: "
        f"[bold]{report.tokens_per_second:.1f} tokens/s[/]"
    )
    console.print(verdict(report))


def load_table(report: Report) -> Table:
    """A line per rank: its experts and their memory, a bar, its rows."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    most, total = max(report.rows_of_rank), sum(report.rows_of_rank)
    for rank, rows in enumerate(report.rows_of_rank):
        table.add_row(
            f"rank {rank}",
            experts_in_words(report.experts_of_rank[rank]),
            f"{report.bytes_of_rank[rank] / 2**20:.1f} MiB",
            ProgressBar(total=max(most, 1), completed=rows, width=32, complete_style="green", finished_style="green"),
            f"{rows}",
            f"{rows / max(total, 1):.0%}",
        )
    return table


def verdict(report: Report) -> Line:
    """Whether all is as in one process, and which texts are not."""
    bound = f"largest difference of a logit {report.difference:.1e}, tolerance {TOLERANCE:.0e}"
    if report.agrees:
        return Line(f"Text and logits equal those of the same model in one process\n({bound}).", "green")
    wrong = [f"  rank {text.rank}: {why(text)}" for text in report.texts if not text.agrees]
    return Line("\n".join([f"NOT what the same model writes in one process\n({bound}):", *wrong]), "bold red")


def why(text: Text) -> str:
    """What is wrong with a text."""
    what = "the text differs" if not text.same_tokens else f"a logit differs by {text.difference:.1e}"
    return f"{what}, after {text.prompt!r}"


def experts_in_words(experts: tuple[int, ...]) -> str:
    """ "experts 4-7"; they are contiguous."""
    if not experts:
        return "no experts"
    return f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]}-{experts[-1]}"


def ranks_in_words(ranks: list[int]) -> str:
    """ "rank 3 has", "ranks 3-7 have"; they are contiguous."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]} have"


def printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
