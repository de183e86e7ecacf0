"""Baseline `ragged_all_to_all`: a row per (token, choice), both ways. XLA has it on GPUs only.

A slab holds the rows that one rank sends to another, in order of token and k. Slots number the rows
of all slabs: out slots at the sender, in slots at the receiver. Combine sends the rows back through
the same slots and sums them at the source. The capacity must hold all rows.

Forward only: `all_gather` is 4 to 41 times as fast on four H200s (docs/dev/performance.md).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from baselines.grouping import I32, Grouping, Received, Shapes, group, invert, received, take
from baselines.rows import as_bits, as_floats, weighted_sum


class Route(NamedTuple):
    """Which row goes through which slot. The content of empty slots is unspecified."""

    choice_of_out: jax.Array  # int32[n_out], own choices
    out_of_choice: jax.Array  # int32[T, K], own; n_out = not sent
    in_of_row: jax.Array  # int32[C]
    row_of_in: jax.Array  # int32[n_in]
    # int32[R, R] by source and receiver: rows, first out and in slot.
    slabs: tuple[jax.Array, jax.Array, jax.Array]


def dispatch(shapes: Shapes, tokens: jax.Array, topk_ids: jax.Array) -> Received:
    """Rows in the contract's order, out of one slab from each rank."""
    grouping = group(shapes, topk_ids)
    route = _plan(shapes, topk_ids, grouping)
    sent = take(as_bits(tokens), route.choice_of_out // shapes.top_k)
    rows = take(_exchange(shapes, sent, route), route.in_of_row)
    rows = as_floats(rows, tokens.dtype)
    return received(shapes, rows, topk_ids, grouping, route)


def combine(
    shapes: Shapes, rows: jax.Array, received: Received, topk_weights: jax.Array
) -> jax.Array:
    """`[T, H]`; weights are applied at the source."""
    route, dtype = received.plan, rows.dtype
    sent = take(as_bits(rows), route.row_of_in)
    choices = _exchange(shapes, sent, route, back=True)
    out = weighted_sum(choices, route.out_of_choice, topk_weights, dtype)
    return out.astype(dtype)


def _plan(shapes: Shapes, topk_ids: jax.Array, grouping: Grouping) -> Route:
    n, n_ranks, n_local = shapes.n_choices, shapes.n_ranks, shapes.n_local_experts
    rank = lax.axis_index(shapes.axis_name)
    ids = lax.all_gather(topk_ids, shapes.axis_name, tiled=True).reshape(-1, n)
    is_expert = (ids >= 0) & (ids < shapes.n_experts)
    to = jnp.where(is_expert, ids // n_local, n_ranks)
    goes = to[:, :, None] == jnp.arange(n_ranks)  # [source, choice, receiver]
    sizes = goes.sum(axis=1, dtype=I32)
    position = jnp.cumsum(goes, axis=1, dtype=I32) - 1  # in the slab
    first_out = jnp.cumsum(sizes, axis=1) - sizes
    first_in = jnp.cumsum(sizes, axis=0) - sizes
    out = jnp.where(goes, first_out[:, None] + position, 0)[rank].sum(axis=1)
    out_of_choice = jnp.where(is_expert[rank], out, n)
    arrives = (first_in[:, None] + position)[:, :, rank].reshape(-1)
    in_of_row = take(arrives, grouping.choice_of_row)
    in_use = jnp.arange(shapes.capacity) < grouping.first_rows[-1]
    return Route(
        choice_of_out=invert(out_of_choice, n),
        out_of_choice=out_of_choice.reshape(-1, shapes.top_k),
        in_of_row=in_of_row,
        row_of_in=invert(jnp.where(in_use, in_of_row, shapes.capacity), shapes.capacity),
        slabs=(sizes, first_out, first_in),
    )


def _exchange(shapes: Shapes, x: jax.Array, route: Route, *, back: bool = False) -> jax.Array:
    """Sends rows, as bits, from out slots to in slots; with `back`, the other way."""
    n_slots = (route.choice_of_out if back else route.row_of_in).size
    sizes, first, arrives = route.slabs
    if back:
        sizes, first, arrives = sizes.T, arrives.T, first.T
    rank, x = lax.axis_index(shapes.axis_name), as_floats(x, jnp.bfloat16)
    arrived = lax.ragged_all_to_all(
        x,
        lax.empty((n_slots, x.shape[1]), x.dtype),
        first[rank],
        sizes[rank],
        arrives[rank],
        sizes[:, rank],
        axis_name=shapes.axis_name,
    )
    return as_bits(arrived)
