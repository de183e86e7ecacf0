"""Counts how many rows each rank sends to each expert."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import jax_ep
from program import Program


def count_traffic(
    group: jax_ep.EPGroup, program: Program, params: Any, windows: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Returns int[n_layers, R, E]: rows from each rank to each expert, per layer.

    Raises:
        RuntimeError: the group's own counters disagree.
    """
    before = rows_sent(group)
    _, routing = program.evaluate(params, program.put(windows))
    ids = np.asarray(routing.topk_ids)  # [n_layers, N, K], N by source rank
    ids = ids.reshape(len(ids), group.n_ranks, -1, 1)
    counts = (ids == np.arange(group.config.n_experts)).sum(axis=2)
    if before is not None and not np.array_equal(counts.sum(axis=0), rows_sent(group) - before):
        raise RuntimeError(
            "The group's counters must match the rows that the routers chose; they do not."
        )
    return counts


def rows_sent(group: jax_ep.EPGroup) -> NDArray[np.int64] | None:
    """Returns int[R, E], the group's own counts, or None if its transport keeps none."""
    try:
        ranks = sorted(group.stats(), key=lambda stats: stats.rank)
    except NotImplementedError:
        return None
    return np.stack([stats.rows_to_expert for stats in ranks])
