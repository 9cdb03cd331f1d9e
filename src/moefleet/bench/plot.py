"""A run as a picture: a column of panels for each layout, a line for each world and token count, bars in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import MoEEpNotBuiltError, config_error
from ..timing import PHASES
from .cases import GLOO_RAW
from .records import Record
from .report import by_candidate, headline, unique

COLORS = ("#2a6f97", "#e07a5f", "#81b29a", "#f2cc8f", "#6d597a")
GRAY = "#9a9a9a"
WHOLE = {"comm": "both", "layer": "total", "model": "decode"}
TITLES = {
    "comm": "µs per step (dispatch + combine), median of the slowest rank; ×: gloo-raw's time / this time",
    "layer": "µs per layer, median of the slowest rank; ×: the first one's time / this time",
    "model": "µs per decode step; ×: the unmodified model's time for a whole text / this time",
}


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
    """Draw the median of a whole step, in its phases where they add up to it, and the ratio that is claimed."""
    whole = WHOLE[found[0].what]
    layouts, sizes = unique(r.layout for r in found), unique((r.world, r.tokens) for r in found)
    candidates = len(unique(r.transport for r in found))
    size = (max(7.0, 1.0 + 3.0 * len(layouts)), 1.6 + (0.5 + 0.28 * candidates) * len(sizes))
    figure = _figure(figsize=size)
    grid = figure.subplots(len(sizes), len(layouts), squeeze=False, sharex="row")
    for title, panel in zip(layouts, grid[0]):
        panel.set_title(title, fontsize=10)
    for line, (world, tokens) in zip(grid, sizes):
        of_line = [r for r in found if (r.world, r.tokens) == (world, tokens)]
        for panel, layout in zip(line, layouts):
            _draw(panel, [r for r in of_line if r.layout == layout], whole)
        line[0].set_ylabel(f"{tokens} tokens\n{world} ranks", fontsize=9)
        line[0].set_xlim(right=1.3 * line[0].get_xlim()[1])  # room for the labels
    handles = dict(pair for panel in grid.flat for pair in zip(*reversed(panel.get_legend_handles_labels())))
    title = TITLES[found[0].what]
    if handles:
        place = {"loc": "outside lower center", "ncols": len(handles), "frameon": False}
        figure.legend(handles.values(), handles.keys(), fontsize=8, title=title, title_fontsize=9, **place)
    else:
        figure.supxlabel(title, fontsize=9)
    figure.suptitle("\n".join(headline(found[0]).splitlines()[:2]), fontsize=9)
    figure.savefig(path, dpi=150)


def _draw(panel: Any, found: Sequence[Record], whole: str) -> None:
    """The bars of one case."""
    for place, (name, phases) in enumerate(by_candidate(found).items()):
        left = 0.0
        for label, color, width in _pieces(name, place, phases, whole):
            bars = panel.barh([name], [width], left=left, color=color, label=label)
            left += width
        panel.bar_label(bars, [_label(phases, whole)], padding=3, fontsize=8)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)


def _pieces(name: str, place: int, phases: dict[str, Any], whole: str) -> Iterator[tuple[str | None, str, float]]:
    """Label, color and width of a candidate's bars."""
    if whole == "both" or "compute" not in phases:
        color = GRAY if name == GLOO_RAW or whole == "decode" else COLORS[place % len(COLORS)]
        yield None, color, phases[whole].median_us
        return
    for phase, color in zip((*PHASES, "rest"), COLORS):
        if phase in phases:
            yield phase, color, phases[phase].median_us


def _label(phases: dict[str, Any], whole: str) -> str:
    record, median = phases.get("run", phases[whole]), f"{phases[whole].median_us:.0f}"
    ratio = getattr(record, "ratio_to_gloo_raw", record.ratio_to_first)
    return median if ratio is None or record.transport == GLOO_RAW else f"{median} ({1 / ratio:.2f}×)"


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoEEpNotBuiltError(
            f"--plot needs matplotlib ({error}): pip install 'moefleet[plot]', or write --json and plot it elsewhere"
        ) from error
    return Figure(layout="constrained", **options)
