"""The figure: microseconds of a dispatch and of a combine, by tokens per rank."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from gpu import figures
from gpu.contestants import OURS, RIVALS

# Of the Okabe-Ito palette: told apart with any kind of colour vision.
_COLOURS = dict(
    zip((*OURS, *RIVALS), ("#0072B2", "#56B4E9", "#E69F00", "#009E73"), strict=True)
)


def draw(record: dict[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG: the uniform cases of the largest hidden size."""
    cases = [c for c in figures.cases(record) if c[0].get("routing") == "uniform"]
    hidden = max(case["hidden_size"] for case, _ in cases)
    cases = [c for c in cases if c[0]["hidden_size"] == hidden]
    drawn, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, dpi=130)
    for axis, operation in zip(axes, figures.OPERATIONS, strict=True):
        for who, colour in _COLOURS.items():
            _draw_line(axis, cases, who, operation, colour)
        _draw_wall(axis, record, cases, hidden)
        _style(axis, operation, sorted({case["n_tokens"] for case, _ in cases}))
    axes[0].set_ylabel("GPU time of one call, µs")
    axes[1].legend(frameon=False)
    machine = record["machine"]
    drawn.text(
        0.99,
        0.01,
        f"{machine['n_devices']} × {machine['device']}, one process; H = {hidden}, "
        f"E = 256, K = 8, bfloat16, uniform routing; jax {machine['jax']}",
        ha="right",
        size=8,
        color="0.4",
    )
    drawn.tight_layout(rect=(0, 0.03, 1, 1))
    drawn.savefig(path)
    plt.close(drawn)


def _draw_line(
    axis: plt.Axes, cases: list, who: str, operation: str, colour: str
) -> None:
    points = [
        (case["n_tokens"], results[who][operation])
        for case, results in cases
        if operation in results.get(who, {})
    ]
    if points:
        tokens = [n for n, _ in points]
        middle = [f["median_us"] for _, f in points]
        axis.plot(tokens, middle, marker="o", markersize=4, color=colour, label=who)
        low, high = ([f[key] for _, f in points] for key in ("min_us", "max_us"))
        axis.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_wall(axis: plt.Axes, record: dict, cases: list, hidden: int) -> None:
    """What the link would take for one message per (token, remote rank)."""
    link = record.get("link", {}).get("gb_s")
    points = {
        case["n_tokens"]: results[OURS[0]]["traffic"]["remote_messages"]
        for case, results in cases
        if "traffic" in results.get(OURS[0], {})
    }
    if link and points:
        us = [n * hidden * 2 / link * 1e-3 for n in points.values()]
        label = f"the same bytes at {link:.0f} GB/s"
        axis.plot(list(points), us, "--", color="0.4", linewidth=1, label=label)


def _style(axis: plt.Axes, operation: str, tokens: list[int]) -> None:
    axis.set_title(operation, size=10)
    axis.set_xlabel("tokens per rank")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [str(n) for n in tokens], rotation=45)
    axis.minorticks_off()
    axis.set_ylim(bottom=1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.9")
    axis.set_axisbelow(True)
