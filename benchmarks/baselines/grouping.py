"""Row order: which choice each row holds, computed in plain `jax.lax`.

Rows are ordered by local expert, source rank, token, k. A choice is a flat index into the
`[R, T, K]` ids of all ranks. Each platform has the formulation that is faster there:

* CPU: every rank sorts its own choices, and all ranks merge the R sorted lists by adding up counts.
* GPU: one sort of all choices, packed with their experts into int32 keys. With few tokens, the
  number of kernels determines the time of a round trip, and this formulation has few.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

I32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of one call, and the platform that it is tuned for."""

    axis_name: str
    n_ranks: int  # R
    n_tokens: int  # T
    n_experts: int  # E
    top_k: int  # K
    capacity: int  # C
    on_gpu: bool

    @property
    def n_local_experts(self) -> int:
        """Experts per rank (L)."""
        return self.n_experts // self.n_ranks

    @property
    def n_choices(self) -> int:
        """Choices of one rank."""
        return self.n_tokens * self.top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """The results of the contract, by name, and what combine needs."""

    tokens: jax.Array  # [C, H]
    row_offsets: jax.Array  # uint32[L + 1]
    src_info: jax.Array  # int32[C, 2]
    n_dropped: jax.Array  # int32[]
    n_invalid: jax.Array  # int32[]
    plan: Any


class Grouping(NamedTuple):
    """Which choice each row of this rank holds, and vice versa."""

    choice_of_row: jax.Array  # int32[C]; any choice in rows that are not in use
    row_of_choice: jax.Array  # int32[R * T * K]; C = no row here
    first_rows: jax.Array  # int32[L + 1], before the cut at C


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of `x`; an arbitrary one where the index is out of range."""
    index = jnp.clip(index, 0, x.shape[0] - 1)
    return x.at[index].get(mode="promise_in_bounds")


def invert(index: jax.Array, n: int) -> jax.Array:
    """int32[n] with `result[index[i]] = i`, and 0 elsewhere."""
    iota = jnp.arange(index.size, dtype=I32)
    return jnp.zeros(n, I32).at[index].set(iota, mode="drop", unique_indices=True)


def group(shapes: Shapes, topk_ids: jax.Array) -> Grouping:
    """Groups the choices of all ranks into the rows of this rank's experts."""
    return _sort_all(shapes, topk_ids) if shapes.on_gpu else _merge(shapes, topk_ids)


def received(
    shapes: Shapes, rows: jax.Array, topk_ids: jax.Array, grouping: Grouping, plan: Any
) -> Received:
    """Assembles the results of a dispatch."""
    choice, k = grouping.choice_of_row % shapes.n_choices, shapes.top_k
    capacity, first_rows = shapes.capacity, grouping.first_rows
    invalid = (topk_ids < -1) | (topk_ids >= shapes.n_experts)
    return Received(
        tokens=rows,
        row_offsets=jnp.minimum(first_rows, capacity).astype(jnp.uint32),
        src_info=jnp.stack([choice // k, choice % k], axis=1),
        n_dropped=jnp.maximum(first_rows[-1] - capacity, 0),
        n_invalid=jnp.sum(invalid, dtype=I32),
        plan=plan,
    )


def _sort(experts: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array]:
    """Sorts choices by expert; returns keys and each expert's first. Expert `n_experts` = none."""
    n = experts.size
    if (n_experts + 1) * n >= 2**31:
        raise ValueError("expert and choice must fit into one int32 key.")
    keys = lax.sort(experts * n + jnp.arange(n, dtype=I32))
    first_keys = jnp.arange(n_experts + 1, dtype=I32) * n
    start = jnp.searchsorted(keys, first_keys, method="scan_unrolled").astype(I32)
    return keys, start


def _sort_all(shapes: Shapes, topk_ids: jax.Array) -> Grouping:
    n_local, capacity = shapes.n_local_experts, shapes.capacity
    ids = lax.all_gather(topk_ids, shapes.axis_name, tiled=True).reshape(-1)
    expert = ids - lax.axis_index(shapes.axis_name) * n_local
    expert = jnp.where((expert >= 0) & (expert < n_local), expert, n_local)
    keys, first_rows = _sort(expert, n_local)
    order, row = keys % ids.size, jnp.arange(ids.size, dtype=I32)
    row = jnp.where(keys < n_local * ids.size, jnp.minimum(row, capacity), capacity)
    # `expert` only lends its shape: all entries are overwritten. XLA would copy zeros each time.
    row_of_choice = expert.at[order]
    row_of_choice = row_of_choice.set(row, unique_indices=True, mode="promise_in_bounds")
    return Grouping(order[:capacity], row_of_choice, first_rows)


def _merge(shapes: Shapes, topk_ids: jax.Array) -> Grouping:
    """Gathers each rank's sorted list, then computes each choice's row from counts."""
    n, n_experts, capacity = shapes.n_choices, shapes.n_experts, shapes.capacity
    ids, n_local = topk_ids.reshape(-1), shapes.n_local_experts
    experts = jnp.where((ids >= 0) & (ids < n_experts), ids, n_experts)
    keys, start = _sort(experts, n_experts)
    position = invert(keys % n, n)  # of each choice in the sorted list
    message = lax.all_gather(jnp.concatenate([experts, position, start]), shapes.axis_name)
    experts, position, start = jnp.split(message, [n, 2 * n], axis=1)  # [R, ...]

    first_expert = lax.axis_index(shapes.axis_name) * n_local
    start = lax.dynamic_slice_in_dim(start, first_expert, n_local + 1, axis=1)
    counts = jnp.diff(start, axis=1)  # [R, L]
    ends = jnp.cumsum(counts.T.reshape(-1)).reshape(n_local, -1)  # in row order
    shifts = ends.T - counts - start[:, :-1]  # [R, L], from position to row
    row = jnp.full_like(experts, capacity)  # of other ranks' experts
    for i in range(n_local):
        row = jnp.where(experts - first_expert == i, position + shifts[:, i, None], row)
    row = jnp.minimum(row, capacity).reshape(-1)
    first_rows = jnp.concatenate([jnp.zeros(1, I32), ends[:, -1]])
    return Grouping(invert(row, capacity), row, first_rows)
