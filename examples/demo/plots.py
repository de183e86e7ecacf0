"""The demo's two figures."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from train import History

TRAINING, HELD_OUT, REFERENCE = "#4477aa", "#cc6677", "#222222"


def plot_loss(path: Path, history: History, reference: list[float], entropy: float) -> None:
    """Draws the loss by step and, next to it, the first steps together with the reference."""
    losses, n = history.losses, len(reference)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    whole, start = figure.subplots(1, 2, width_ratios=(3, 2))
    steps = np.arange(1, len(losses) + 1)
    whole.plot(steps, losses, color=TRAINING, lw=1, label="training batch")
    held_out = zip(*history.held_out.items(), strict=True)
    whole.plot(*held_out, "o-", color=HELD_OUT, label="held-out text", clip_on=False)
    whole.axhline(entropy, color="gray", ls="--", label="unigram entropy")
    whole.set(title="A byte-level MoE language model", ylabel="loss (nats per byte)")
    whole.set(xlabel="training step", xlim=(0, len(losses)), ylim=(0, None))

    start.plot(steps[:n], losses[:n], color=TRAINING, lw=2, label="expert parallel")
    style = {"color": REFERENCE, "label": "dense, same parameters"}
    start.plot(steps[:n], reference, "x", **style)
    gap = np.abs(np.subtract(losses[:n], reference)).max()
    start.set(title=f"The first {n} steps: at most {gap:.0e} apart")
    start.set(xlabel="training step", ylabel="loss (nats per byte)")
    start.xaxis.get_major_locator().set_params(integer=True)
    for axes in (whole, start):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_traffic(path: Path, counts: NDArray) -> None:  # int[n_layers, R, E]
    """Draws how many tokens each rank sends to each expert, one panel per layer."""
    n_layers, n_ranks, n_experts = counts.shape
    size = 2 + 0.44 * n_experts, 0.6 + n_layers * (0.8 + 0.38 * n_ranks)  # inches
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(n_layers, squeeze=False)
    for layer, axes in enumerate(panels.flat):
        image = axes.imshow(counts[layer], cmap="Blues", vmin=0, vmax=counts.max())
        draw_ranks(axes, n_ranks, n_experts // n_ranks)
        for (rank, expert), count in np.ndenumerate(counts[layer]):
            color = "white" if count > 0.6 * counts.max() else "black"
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
            axes.text(expert, rank, f"{count}", **style)
        axes.set(title=f"MoE layer {layer + 1}", ylabel="source rank")
        axes.set(yticks=range(n_ranks), xticks=range(n_experts))
    panels[-1, 0].set_xlabel("expert (boxes: the source rank's own experts)")
    figure.suptitle("Tokens that each rank sends to each expert, one held-out batch")
    figure.colorbar(image, ax=panels, label="tokens", shrink=0.8)
    figure.savefig(path, dpi=150)


def draw_ranks(axes: Axes, n_ranks: int, n_local_experts: int) -> None:
    """Draws lines between the experts of different ranks, and a box around each rank's own."""
    for rank in range(n_ranks):
        left = rank * n_local_experts - 0.5
        axes.axvline(left, color="gray", lw=0.8)
        box = Rectangle((left, rank - 0.5), n_local_experts, 1)
        box.set(fill=False, edgecolor="#cc6677", lw=1.8, zorder=3)
        axes.add_patch(box)
