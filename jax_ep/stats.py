"""RankStats, what a rank has counted since its group was opened; and plot_traffic, its figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from jax_ep.geometry import Geometry, MeshCoordinate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


@dataclasses.dataclass(frozen=True, eq=False)
class RankStats:
    """Totals of one device of this process, over all completed calls of a group.

    With several nodes and XLA's collectives between them, `p2p` and `host` count what they carry: a
    rank sends the tokens of all ranks that have its index within their nodes, to the ranks of its
    own node. So its `tokens_to_rank`, `bytes_to_rank` and `rows_to_expert` are totals over these
    source ranks; for other nodes, they and the waits are zero. Totals over all ranks are those of
    one node.

    The backward of `dispatch` counts as a combine: as two if tokens are quantized and
    `topk_weights` have a gradient. The backward of `combine` is not counted.

    Attributes:
        device: `jax.Device.id`.
        replica: index over the mesh's other axes.
        rank: index along the expert-parallel axis, or over the product of several.
        dispatch_calls: dispatches whose rows were laid out.
        combine_calls: combines that all ranks have started. (On `p2p`, cotangents in float32 may
            take two calls if the rows are bfloat16.)
        tokens_to_rank: `int64[R]`, (token, rank) pairs sent, one copy each. The entry for this rank
            itself counts all tokens if there is a shared expert. Zero with `skip_a2a`.
        bytes_to_rank: `int64[R]`, payload and scales of those tokens on the wire.
        rows_to_expert: `int64[E]`, choices of this rank's tokens, by global expert, dropped ones
            included. With `skip_a2a`, only choices of this rank's experts.
            Those that copies took (`expert_copies`) are in `rows_to_copies` instead.
        rows_per_expert: `int64[L]`, rows that arrived here and fit, by local expert.
        rows_to_copies: `int64[R]`, choices of this rank's tokens that each rank's copies took.
        rows_per_copy: `int64[B]`, rows that arrived here and fit, by copy, whichever experts they
            were of: `Dispatched.copies` says that of a call.
        dropped_rows: rows for this rank's experts that did not fit, a shared expert's included.
        invalid_ids: ids of this rank outside `[-1, E)`.
        wait_s: `float64[2, R]`, seconds that this rank waited for each peer in (dispatch, combine),
            summed over calls; 0 for itself. A wait begins when the rank is ready to receive. It
            ends on `host` when the peer makes the call, on `p2p` when the one warp that measures
            sees the peer's counts (dispatch) or its start word (combine). Simultaneous waits count
            for each peer. `p2p` converts GPU cycles at the maximum clock rate, so a throttled clock
            makes waits look shorter.
        longest_wait_s: `float64[2, R]`, the longest such wait in one call.
    """

    device: int
    replica: int
    rank: int
    dispatch_calls: int
    combine_calls: int
    tokens_to_rank: np.ndarray
    bytes_to_rank: np.ndarray
    rows_to_expert: np.ndarray
    rows_per_expert: np.ndarray
    rows_to_copies: np.ndarray
    rows_per_copy: np.ndarray
    dropped_rows: int
    invalid_ids: int
    wait_s: np.ndarray
    longest_wait_s: np.ndarray

    @classmethod
    def of_devices(cls, geometry: Geometry, counts: Sequence[dict[str, Any]]) -> list[Self]:
        """One for each device of this process, from their counts in mesh order."""
        pairs = zip(geometry.local_coordinates, counts, strict=True)
        return [cls.from_counts(geometry, *pair) for pair in pairs]

    @classmethod
    def from_counts(
        cls, geometry: Geometry, coordinate: MeshCoordinate, counts: dict[str, Any]
    ) -> Self:
        """From an extension's counts (`ffi/modules/dicts.h`), without a shared expert's.

        They cover the ranks that exchange tokens, which is one with `skip_a2a`.
        """
        fields: dict[str, Any] = {
            name: np.asarray(value, np.int64) if isinstance(value, list) else value
            for name, value in counts.items()
        }
        n_ranks, n_nodes = len(fields["tokens_to_rank"]), geometry.routed.n_source_nodes
        per_expert = fields.pop("rows_per_group").reshape(-1, n_nodes).sum(1)
        sent = fields.pop("rows_to_group").reshape(n_ranks, -1, n_nodes).sum(2)
        end = len(per_expert) - geometry.config.expert_copies
        first = end - geometry.n_local_experts
        of_experts = _by_rank(sent[:, first:end], geometry, coordinate)
        fields["rows_to_expert"] = of_experts.reshape(-1)
        fields["rows_per_expert"] = per_expert[first:end]
        fields["rows_to_copies"] = _by_rank(sent[:, end:].sum(1), geometry, coordinate)
        fields["rows_per_copy"] = per_expert[end:]
        for name in ("wait", "longest_wait"):
            waits = fields.pop(f"{name}_ns").reshape(2, n_ranks) * 1e-9
            fields[f"{name}_s"] = _by_rank(waits.T, geometry, coordinate).T
        for name in ("tokens_to_rank", "bytes_to_rank"):
            is_counted = n_ranks == geometry.n_ranks or geometry.intra_node
            counted = fields[name] if is_counted else np.zeros_like(fields[name])
            fields[name] = _by_rank(counted, geometry, coordinate)
        replica, rank = coordinate.replica, coordinate.rank
        return cls(device=coordinate.device.id, replica=replica, rank=rank, **fields)


def describe_drops(geometry: Geometry, stats: Sequence[RankStats]) -> str | None:
    """A warning for the user, if rows were dropped on devices of this process."""
    dropping = [one for one in stats if one.dropped_rows]
    if not dropping:
        return None
    n_rows = sum(one.dropped_rows for one in dropping)
    n_replicas = len({one.replica for one in stats})
    ranks = ", ".join(
        f"{one.rank} (replica {one.replica})" if n_replicas > 1 else str(one.rank)
        for one in dropping
    )
    return (
        f"Group {geometry.key} has dropped {n_rows} rows, on ranks {ranks}, in up to "
        f"{max(one.dispatch_calls for one in dropping)} dispatches: more came than the capacity, "
        f"{geometry.max_recv_tokens} rows unless a dispatch has its own. Their tokens lack what "
        f"these experts add. {_advise(geometry)} (docs/observe.md)."
    )


def _advise(geometry: Geometry) -> str:
    """What makes room for rows that were dropped."""
    if geometry.max_recv_tokens < geometry.config.worst_case_rows(geometry.n_ranks):
        copies = "expert_copies or " if geometry.config.expert_copies else ""
        return f"Raise {copies}recv_capacity, or balance the experts"
    if geometry.config.top_k <= geometry.n_local_experts:  # only a dispatch's own drops rows
        return "Raise the recv_capacity of the dispatch, or balance the experts"
    return (
        "The group's capacity cannot be larger: let each token name an expert at most once, or "
        "raise the recv_capacity of a dispatch that has its own"
    )


def _by_rank(values: np.ndarray, geometry: Geometry, coordinate: MeshCoordinate) -> np.ndarray:
    """`[R, ...]`: values of the ranks that this one exchanges tokens with, zeros elsewhere."""
    n_ranks = len(values)
    result = np.zeros((geometry.n_ranks, *values.shape[1:]), values.dtype)
    first = coordinate.rank // n_ranks * n_ranks
    result[first : first + n_ranks] = values
    return result


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
