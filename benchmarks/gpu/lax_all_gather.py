"""Rival `all_gather` on GPUs: every rank gets all tokens and picks its experts' rows.

One sort of packed (local expert, choice) keys gives the row order; one gather writes
the rows. Combine adds up each token's rows where the experts are, weighted, in one
fused loop of K gathers, and a `psum_scatter` adds up the ranks' sums, in bfloat16: half
the bytes of float32, at a rounding per hop.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lax_grouping import Received, Shapes
from lax_rows import I32, as_bits, take, weighted_sum


class Plan(NamedTuple):
    """Rows of this rank. A choice is an index into all ranks' `[R, T, K]`, flat."""

    row_of_choice: jax.Array  # int32[R * T * K]; C = no row here


def dispatch(shapes: Shapes, tokens: jax.Array, topk_ids: jax.Array) -> Received:
    """Rows in the contract's order, out of all ranks' tokens."""
    everyones_ids = lax.all_gather(topk_ids, shapes.axis_name, tiled=True)
    everyones = lax.all_gather(tokens, shapes.axis_name, tiled=True)
    choice_of_row, offsets, row_of_choice = _group(shapes, everyones_ids.reshape(-1))
    choice = choice_of_row % shapes.n_choices
    return Received(
        tokens=take(everyones, choice_of_row // shapes.top_k),
        row_offsets=jnp.minimum(offsets, shapes.capacity).astype(jnp.uint32),
        src_info=jnp.stack([choice // shapes.top_k, choice % shapes.top_k], axis=1),
        n_dropped=jnp.maximum(offsets[-1] - shapes.capacity, 0),
        n_invalid=count_invalid(shapes, topk_ids),
        plan=Plan(row_of_choice),
    )


def combine(
    shapes: Shapes, rows: jax.Array, received: Received, topk_weights: jax.Array
) -> jax.Array:
    """`[T, H]`, weighted where the experts are."""
    weights = lax.all_gather(topk_weights, shapes.axis_name, tiled=True)
    row_of_choice = received.plan.row_of_choice.reshape(-1, shapes.top_k)
    total = weighted_sum(as_bits(rows), row_of_choice, weights, rows.dtype)
    total = total.astype(rows.dtype)
    return lax.psum_scatter(total, shapes.axis_name, scatter_dimension=0, tiled=True)


def count_invalid(shapes: Shapes, topk_ids: jax.Array) -> jax.Array:
    """Ids of this rank that name neither an expert nor, as -1, none."""
    return jnp.sum((topk_ids < -1) | (topk_ids >= shapes.n_experts), dtype=I32)


def _group(shapes: Shapes, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`choice_of_row` int32[C], first row of each local expert, `row_of_choice`."""
    n, n_local, capacity = ids.size, shapes.n_local_experts, shapes.capacity
    if (n_local + 1) * n >= 2**31:
        raise ValueError("expert and choice must fit into one int32 key.")
    expert = ids - lax.axis_index(shapes.axis_name) * n_local
    expert = jnp.where((expert >= 0) & (expert < n_local), expert, n_local)
    iota = jnp.arange(n, dtype=I32)
    keys = lax.sort(expert * n + iota)
    first_keys = jnp.arange(n_local + 1, dtype=I32) * n
    offsets = jnp.searchsorted(keys, first_keys, method="scan_unrolled").astype(I32)
    order = keys % n
    row = jnp.where(iota < jnp.minimum(offsets[-1], capacity), iota, capacity)
    row_of_choice = (
        jnp.zeros(n, I32)
        .at[order]
        .set(row, unique_indices=True, mode="promise_in_bounds")
    )
    return order[:capacity], offsets, row_of_choice
