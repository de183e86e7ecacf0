"""plot_traffic: who sends how much to whom, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from jax_ep.stats import RankStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


@overload
def plot_traffic(stats: Sequence[RankStats], figure: Figure | None = None) -> Figure: ...
@overload
def plot_traffic(stats: Sequence[RankStats], figure: SubFigure) -> SubFigure: ...
def plot_traffic(
    stats: Sequence[RankStats], figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Draws the totals of a group's ranks.

    The upper panel shows `rows_to_expert`: rows from each rank to each global expert,
    with lines between the experts of different ranks. The lower panels show how long each rank
    waited for each peer in dispatch and in combine.

    Args:
        stats: the result of `EPGroup.stats()`; with several processes, the concatenated lists of
            all of them. Ranks are drawn ordered by replica and rank.
        figure: where to draw, such as one of `Figure.subfigures`; None is a new figure.

    Returns:
        The figure. A new one is not attached to a window; `figure.savefig(...)` writes it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `stats` is empty, or from groups of different shapes.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("plot_traffic needs matplotlib: pip install 'jax_ep[plot]'.") from error
    ranks = sorted(stats, key=lambda one: (one.replica, one.rank))
    shapes = {(one.wait_s.shape[1], len(one.rows_to_expert)) for one in ranks}
    if len(shapes) != 1:
        raise ValueError(
            "stats must be from the ranks of one group; got (n_ranks, n_experts) = "
            f"{sorted(shapes)}."
        )
    names = _names(ranks)
    rows = np.stack([one.rows_to_expert for one in ranks])
    waits_ms = 1e3 * np.stack([one.wait_s for one in ranks])
    n_ranks, n_experts = next(iter(shapes))

    if figure is None:
        figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplot_mosaic([["rows", "rows"], ["dispatch", "combine"]])
    _draw(panels["rows"], rows, names, "rows sent", "global expert")
    for rank in range(1, n_ranks):
        panels["rows"].axvline(rank * n_experts // n_ranks - 0.5, color="white", lw=1)
    for i, call in enumerate(("dispatch", "combine")):
        title = f"ms waited in {call}"
        _draw(panels[call], waits_ms[:, i], names, title, "for rank")
    for axes in panels.values():
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _names(ranks: Sequence[RankStats]) -> list[str]:
    if len({one.replica for one in ranks}) == 1:
        return [str(one.rank) for one in ranks]
    return [f"{one.replica}: {one.rank}" for one in ranks]


def _draw(axes: Axes, matrix: np.ndarray, names: list[str], title: str, columns: str) -> None:
    image = axes.imshow(matrix, aspect="auto", vmin=0, interpolation="nearest")
    axes.set(title=title, xlabel=columns, ylabel="replica: rank" if ":" in names[0] else "rank")
    axes.set_yticks(range(len(names)), names)
    axes.figure.colorbar(image, ax=axes)
