"""A run as a picture: the time of a whole step, a column of panels for each layout, a line for each token count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import MoEEpNotBuiltError, config_error
from .cpu import GLOO_RAW
from .report import Record

COLORS = ("#2a6f97", "#e07a5f", "#81b29a", "#f2cc8f", "#6d597a")
GRAY = "#9a9a9a"  # the yardstick


def require_plot(path: Path) -> None:
    """Find out before anything is measured whether a picture can be written there.

    Raises:
        MoEEpNotBuiltError: matplotlib is not installed.
        MoEEpConfigError: no such folder, or a kind of file that matplotlib does not write.
    """
    kinds = _figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise config_error("--plot", path, "a file name that ends in ." + ", .".join(sorted(kinds)))
    if not path.absolute().parent.is_dir():
        raise config_error("--plot", path, "a file in a folder that exists")


def plot(found: Sequence[Record], path: Path) -> None:
    """Draw the medians of whole steps, and how many times faster than gloo-raw each is."""
    whole = [record for record in found if record.phase == "both"]
    layouts, tokens = _unique(r.layout for r in whole), _unique(r.tokens for r in whole)
    transports = _unique(r.transport for r in whole)
    colors = {name: COLORS[place % len(COLORS)] for place, name in enumerate(transports)} | {GLOO_RAW: GRAY}
    size = (1.0 + 3.0 * len(layouts), 1.2 + (0.5 + 0.28 * len(transports)) * len(tokens))
    figure = _figure(figsize=size)
    grid = figure.subplots(len(tokens), len(layouts), squeeze=False, sharex="row")
    for line, count in zip(grid, tokens):
        for panel, layout in zip(line, layouts):
            mine = [r for r in whole if (r.layout, r.tokens) == (layout, count)]
            names = [r.transport for r in mine]
            bars = panel.barh(names, [r.median_us for r in mine], color=[colors[name] for name in names])
            panel.bar_label(bars, [_label(r) for r in mine], padding=3, fontsize=8)
            panel.invert_yaxis()
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8)
            if count == tokens[0]:
                panel.set_title(layout, fontsize=10)
        line[0].set_ylabel(f"{count} tokens", fontsize=9)
        line[0].set_xlim(right=1.45 * max(r.median_us for r in whole if r.tokens == count))  # room for the labels
    r = whole[0]
    figure.supxlabel(
        "µs per step (dispatch + combine), median of the slowest rank; ×: gloo-raw's time / this time", fontsize=9
    )
    figure.suptitle(
        f"{r.world} ranks, {r.experts} experts, top-{r.topk} {r.routing}, H {r.hidden} {r.dtype}, "
        f"{r.host['cores']} cores of {r.host['cpu']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _label(record: Record) -> str:
    if record.ratio_to_gloo_raw is None or record.transport == GLOO_RAW:
        return f"{record.median_us:.0f}"
    return f"{record.median_us:.0f} ({1 / record.ratio_to_gloo_raw:.2f}×)"


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoEEpNotBuiltError(
            f"--plot needs matplotlib ({error}): pip install 'moefleet[plot]', or write --json and plot it elsewhere"
        ) from error
    return Figure(layout="constrained", **options)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
