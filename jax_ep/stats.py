"""RankStats: what a rank has counted since its group was opened."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jax_ep.topology import Place

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


@dataclasses.dataclass(frozen=True, eq=False)
class RankStats:
    """Totals of one device of this process, of all calls of a group that have ended.

    The calls of a backward pass count like any others: that of `dispatch` is a combine
    (two, where gradients of `topk_weights` come home, too), that of `combine` a
    dispatch. (On `host` the latter is a call of its own, and not
    counted.)

    Attributes:
        device: `jax.Device.id`.
        row: which group of ranks, counted over the mesh's other axes.
        rank: index along the expert-parallel axis.
        dispatch_calls: dispatches whose rows were laid out.
        combine_calls: combines that all ranks began. (On `p2p`, cotangents in float32
            may take two where the rows are bfloat16.)
        tokens_to_rank: `int64[R]`, (token, rank) pairs sent, one copy each, to this
            rank itself, too: all, where they have a shared expert here. With `skip_a2a`
            none are sent.
        bytes_to_rank: `int64[R]`, bytes of those tokens as they travel: payload and
            scales.
        rows_to_expert: `int64[E]`, choices of this rank's tokens, by global expert;
            dropped ones, too. With `skip_a2a`, choices of this rank's experts only.
        rows_per_expert: `int64[L]`, rows that arrived here and fitted, by local expert.
        dropped_rows: rows for this rank's experts that did not fit, a shared expert's
            among them.
        invalid_ids: ids of this rank outside `[-1, E)`.
        wait_s: `float64[2, R]`, seconds that this rank waited for each peer in
            (dispatch, combine), over all calls; 0 for itself. It waits from when it is
            ready to receive until the peer's call has reached it: on `host` until the
            peer makes the call; on `p2p` until its counts (dispatch), or the word that
            it has begun (combine), are there, as seen by the one warp that measures.
            Waits for several peers at once count for each of them. `p2p` counts cycles
            of the GPU: the seconds are too few by as much as its clock is throttled.
        longest_wait_s: `float64[2, R]`, the longest such wait of one call.
    """

    device: int
    row: int
    rank: int
    dispatch_calls: int
    combine_calls: int
    tokens_to_rank: np.ndarray
    bytes_to_rank: np.ndarray
    rows_to_expert: np.ndarray
    rows_per_expert: np.ndarray
    dropped_rows: int
    invalid_ids: int
    wait_s: np.ndarray
    longest_wait_s: np.ndarray

    @classmethod
    def from_counts(cls, group: EPGroup, place: Place, counts: dict[str, Any]) -> Self:
        """From the counts of an extension, which `ffi/rank_stats_dict.h` names.

        They are those of the ranks that exchange tokens: of one alone, where nothing
        travels. A shared expert is the first of a rank's experts; its rows are left
        out.
        """
        fields = {name: _as_field(value) for name, value in counts.items()}
        n_ranks, n_groups = (
            len(fields["tokens_to_rank"]),
            len(fields["rows_per_expert"]),
        )
        n_shared = n_groups - group.n_local_experts
        sent = fields["rows_to_expert"].reshape(n_ranks, n_groups)[:, n_shared:]
        fields["rows_to_expert"] = _by_rank(sent, group, place).reshape(-1)
        fields["rows_per_expert"] = fields["rows_per_expert"][n_shared:]
        for name in ("wait", "longest_wait"):
            waits = fields.pop(f"{name}_ns").reshape(2, n_ranks) * 1e-9
            fields[f"{name}_s"] = _by_rank(waits.T, group, place).T
        if n_ranks != group.n_ranks:
            for name in ("tokens_to_rank", "bytes_to_rank"):
                fields[name] = np.zeros(group.n_ranks, np.int64)
        return cls(device=place.device.id, row=place.row, rank=place.rank, **fields)


def _as_field(value: Any) -> Any:
    return np.asarray(value, np.int64) if isinstance(value, list) else value


def _by_rank(values: np.ndarray, group: EPGroup, place: Place) -> np.ndarray:
    """`values` `[n, ...]` of all ranks; of a lone one, put where it belongs."""
    if len(values) == group.n_ranks:
        return values
    result = np.zeros((group.n_ranks, *values.shape[1:]), values.dtype)
    result[place.rank] = values[0]
    return result
