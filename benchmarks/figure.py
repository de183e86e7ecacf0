"""The figure: host's speed-up over the best other contestant, by case and operation."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from bench_cases import KEEP_CASES, MAIN_CASES, OPERATIONS
from report import GOAL, speedups

# Of the Okabe-Ito palette: told apart with any kind of colour vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_WIDTH = 0.8 / len(OPERATIONS)


def draw(record: dict[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG: sizes, with each allocator, then variants."""
    all_rows = speedups(record)
    panels = _panels(list(dict.fromkeys(row["case"] for row in all_rows)))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(11, 3.9 * len(panels) + 0.6), squeeze=False, dpi=130
    )
    limits = _limits([row["speedup"] for row in all_rows])
    for axis, (title, chosen) in zip(axes[:, 0], panels, strict=True):
        _draw_panel(axis, title, chosen, all_rows)
        _draw_scale(axis, limits)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        ncols=len(OPERATIONS) + 2,
        loc="upper center",
        frameon=False,
    )
    machine = record["machine"]
    figure.text(
        0.99,
        0.005,
        f"{machine['cpu']}, {machine['cores']} cores, 8 virtual devices; "
        f"R = 8, K = 8, E = 64; jax {machine['jax']}",
        ha="right",
        size=8,
        color="0.4",
    )
    figure.tight_layout(rect=(0, 0.02, 1, 1 - 0.4 / figure.get_figheight()))
    figure.savefig(path)
    plt.close(figure)


def _panels(names: list[str]) -> list[tuple[str, list[str]]]:
    """Titles and the cases below them."""
    main, keep = ({case.name for case in some} for some in (MAIN_CASES, KEEP_CASES))
    common = "uniform routing, worst-case capacity, bfloat16"
    panels = [
        (f"Allocator as users have it; {common}", main),
        (f"Freed memory kept; {common}", keep),
        ("Variants", set(names) - main - keep),
    ]
    chosen = [(title, [n for n in names if n in some]) for title, some in panels]
    return [(title, some) for title, some in chosen if some]


def _draw_panel(
    axis: plt.Axes, title: str, names: list[str], all_rows: list[dict]
) -> None:
    for i, operation in enumerate(OPERATIONS):
        chosen = {
            row["case"]: row["speedup"]
            for row in all_rows
            if row["operation"] == operation and row["case"] in names
        }
        shift = (i - (len(OPERATIONS) - 1) / 2) * _WIDTH
        # Bars start at parity: those of a slower host point down.
        bars = axis.bar(
            [names.index(name) + shift for name in chosen],
            [speedup - 1 for speedup in chosen.values()],
            _WIDTH * 0.92,
            bottom=1,
            color=_COLOURS[i],
            label=operation,
        )
        labels = [f"{x:.1f}" if x >= 1 else f"{x:.2f}" for x in chosen.values()]
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        axis.bar_label(bars, labels, size=8, padding=2, bbox=box)
    axis.set_xticks(range(len(names)), [name.replace("-", "\n") for name in names])
    axis.set_title(title, size=10)


def _limits(values: list[float]) -> tuple[float, float]:
    return min(0.5, 0.7 * min(values)), max(4.0, 1.5 * max(values))


def _draw_scale(axis: plt.Axes, limits: tuple[float, float]) -> None:
    axis.axhline(1, color="0.2", linewidth=1, label="as fast")
    axis.axhline(
        GOAL, color="0.2", linewidth=1, linestyle="--", zorder=0.9, label=f"{GOAL:g}x"
    )
    axis.set_yscale("log", base=2)
    axis.set_ylim(*limits)
    ticks = [t for t in (2.0**i for i in range(-5, 10)) if limits[0] <= t <= limits[1]]
    axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylabel("speed-up of host over\nthe best plain jax.lax", size=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9")
    axis.set_axisbelow(True)
