"""Draws the periods of round trips in a chain, by case and implementation."""

import pathlib

import PIL.Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baselines import BASELINES
from implementations import OURS
from report import ROUND_TRIPS, Report

# From the Okabe-Ito palette, which color-blind readers can tell apart.
_COLORS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7")
_SMALL = {"xycoords": "axes fraction", "size": 7, "color": "0.4"}


def draw(report: Report, path: pathlib.Path) -> None:
    """Writes a PNG with a panel for each kind of round trip, of which there must be some."""
    figure = Figure(figsize=(9, 3.8), dpi=100)
    axes = figure.subplots(1, 2)
    for axis, operation in zip(axes, ROUND_TRIPS, strict=True):
        _draw_panel(axis, report, operation)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
    axes[0].set_ylabel("period in a chain, µs")
    axes[0].legend(frameon=False, fontsize=8)
    facts = report.run.facts
    devices = f"{facts['n_devices']} × {facts['device']}"
    axes[1].annotate(devices if report.on_gpu else facts["cpu"], (0.02, 0.94), **_SMALL)
    figure.tight_layout()
    figure.savefig(path)
    PIL.Image.open(path).convert("RGB").quantize(32).save(path, optimize=True)


def _draw_panel(axis: Axes, report: Report, operation: str) -> None:
    cases = [c for c in report.cases() if report.us(c, operation, "chain", OURS[0])]
    for name, color in zip((*OURS, *BASELINES), _COLORS, strict=False):
        times = [report.us(case, operation, "chain", name) for case in cases]
        points = [(i, us) for i, us in enumerate(times) if us is not None]
        if points:
            style = {"marker": "o", "markersize": 4, "color": color, "label": name}
            axis.plot(*zip(*points, strict=True), **style)
    axis.set_title(operation, size=10)
    axis.set_xticks(range(len(cases)), [report.label(case) for case in cases])
    axis.tick_params(axis="x", labelrotation=30, labelsize=8)
    axis.set_xlabel("T" if report.on_gpu else "T, H")
    axis.set_yscale("log")
