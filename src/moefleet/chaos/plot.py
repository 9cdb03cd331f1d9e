"""A round as a picture: a line for each rank, a mark for each thing that happened to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MoEEpNotBuiltError, config_error
from .report import RoundReport

MARKS = {
    "fault": ("x", "#c1121f", "signal"),
    "flag": ("v", "#e9a23b", "step flagged"),
    "mask": ("D", "#2a6f97", "mask adopted"),
    "degraded": ("s", "#6d597a", "degraded step verified"),
    "continued": (">", "#888888", "continued"),
    "evicted": ("P", "#b5179e", "learns of its eviction"),
    "readmitted": ("^", "#52b788", "readmitted"),
    "moved": ("^", "#40916c", "in the new topology"),
    "full": ("o", "#1b7f3b", "full strength verified"),
}


def require_plot(path: Path) -> None:
    """Find out before anything runs whether a picture can be written there.

    Raises:
        MoEEpNotBuiltError: matplotlib is not installed.
        MoEEpConfigError: no such folder, or a kind of file that matplotlib does not write.
    """
    kinds = _figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise config_error("--plot", path, "a file name that ends in ." + ", .".join(sorted(kinds)))
    if not path.absolute().parent.is_dir():
        raise config_error("--plot", path, "a file in a folder that exists")


def plot(report: RoundReport, path: Path) -> None:
    """Draw the timeline. The axis is linear up to a millisecond and logarithmic from there."""
    moments = [moment for moment in report.timeline if moment.rank >= 0 and moment.kind in MARKS]
    world = 1 + max((moment.rank for moment in moments), default=0)
    figure = _figure(figsize=(9.0, 1.6 + 0.45 * world))
    panel = figure.subplots()
    panel.hlines(range(world), 0, 1, transform=panel.get_yaxis_transform(), color="#dddddd", zorder=0)
    for kind, (marker, color, label) in MARKS.items():
        points = [(1000 * moment.at_s, moment.rank) for moment in moments if moment.kind == kind]
        if points:
            xs, ys = zip(*points, strict=True)
            panel.scatter(xs, ys, marker=marker, color=color, label=label, s=46)
    panel.set_xscale("symlog", linthresh=1.0)
    panel.set_yticks(range(world), [f"rank {rank}" for rank in range(world)])
    panel.invert_yaxis()
    panel.set_xlabel("ms after the fault")
    panel.set_title(report.plan, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoEEpNotBuiltError(
            f"--plot needs matplotlib ({error}): pip install 'moefleet[plot]', or take --json and plot it elsewhere"
        ) from error
    return Figure(layout="constrained", **options)
