"""The figures: loss, and balance of the loads of experts and ranks."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train import History


def plot_loss(path: Path, history: History, entropy: float | None) -> None:
    """Draws the loss by step."""
    losses = history.column("loss")
    steps = history.first_step + np.arange(1, len(losses) + 1)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="#4477aa", label="training batch")
    if entropy is not None:
        axes.axhline(entropy, color="gray", ls="--", label="entropy of the data")
    axes.set(xlabel="training step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_balance(path: Path, history: History) -> None:
    """Draws the load of each layer's busiest expert by step, and all loads of the last step."""
    busiest, load = history.busiest, history.metrics[-1].expert_load
    steps = history.first_step + np.arange(1, len(busiest) + 1)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_step, last = figure.subplots(1, 2, width_ratios=(2, 3))
    shades = np.linspace(0.9, 0.2, busiest.shape[1])
    for layer, of_layer in enumerate(busiest.T):
        color = (*(shades[layer] * np.array([0.4, 0.7, 1.0])),)
        by_step.plot(steps, of_layer, color=color, label=f"layer {layer + 1}")
    by_step.axhline(1, color="gray", ls="--", label="even")
    by_step.set(xlabel="training step", ylabel="busiest expert / mean", ylim=(0, None))
    by_step.spines[["top", "right"]].set_visible(False)
    if busiest.shape[1] <= 8:
        by_step.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    image = last.imshow(
        load / load.mean(axis=1, keepdims=True), aspect="auto", cmap="Blues", vmin=0
    )
    last.set(xlabel="expert", ylabel="layer", title="Load / mean in the last step")
    last.set_yticks(range(len(load)), [str(layer + 1) for layer in range(len(load))])
    figure.colorbar(image, ax=last)
    figure.savefig(path, dpi=150)


def plot_loads(path: Path, history: History) -> None:
    """Draws layers x experts: each expert's load over its layer's mean, in up to six parts."""
    load = history.column("expert_load")  # [n_steps, L, E]
    parts = np.array_split(np.arange(len(load)), min(6, len(load)))
    sums = np.stack([load[part].sum(axis=0) for part in parts])
    relative = sums / sums.mean(axis=2, keepdims=True)
    figure = Figure(figsize=(11, 5), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes in grid.flat[len(parts) :]:
        axes.set_axis_off()
    for axes, part, of_part in zip(grid.flat, parts, relative, strict=False):
        image = axes.imshow(of_part, aspect="auto", cmap="Blues", vmin=0, vmax=relative.max())
        first, last = history.first_step + part[[0, -1]] + 1
        axes.set(title=f"steps {first} to {last}", xlabel="expert", ylabel="layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(len(of_part)), [str(layer + 1) for layer in range(len(of_part))])
        axes.label_outer()
    figure.colorbar(image, ax=grid, label="load / mean")
    figure.savefig(path, dpi=150)


def plot_ranks(path: Path, chosen: np.ndarray, taken: np.ndarray) -> None:
    """Draws the rows of each rank, over the mean: those chosen of its experts, and those taken."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes, ranks = figure.subplots(), np.arange(len(taken))
    bars = ("of its experts", chosen, "#a3c9f1"), ("that it took", taken, "#4477aa")
    for offset, (label, rows, color) in zip((-0.2, 0.2), bars, strict=True):
        axes.bar(ranks + offset, rows / rows.mean(), 0.4, color=color, label=label)
    axes.axhline(1, color="gray", ls="--")
    axes.set(xlabel="rank", ylabel="rows / mean, in all steps", xticks=ranks)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.1))
    figure.savefig(path, dpi=150)
