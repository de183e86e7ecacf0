"""Rival `all_gather`: every rank gets all tokens and picks its experts' rows.

Combine adds up each token's rows where the experts are, weighted, and a float32
`psum_scatter` adds up the ranks' sums. (Sums sent in bfloat16 by `all_to_all` are half
the bytes, but slower on XLA:CPU; so is one all_gather of choices and tokens, packed.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lax_grouping import Grouping, Received, Shapes, exchange_and_merge, received
from lax_grouping import sort_own_choices as sort_choices
from lax_rows import (
    F32,
    as_bits,
    as_floats,
    dot_each,
    take,
    take_float32,
    used_blocks,
    weighted_sum,
)


def dispatch(shapes: Shapes, tokens: jax.Array, topk_ids: jax.Array) -> Received:
    """Rows in the contract's order, out of all ranks' tokens."""
    grouping = exchange_and_merge(shapes, sort_choices(shapes, topk_ids))
    rows = _gather_rows(shapes, tokens, grouping)
    return received(shapes, rows, topk_ids, grouping, grouping)


def combine(
    shapes: Shapes, rows: jax.Array, received: Received, topk_weights: jax.Array
) -> jax.Array:
    """`[T, H]`, weighted where the experts are."""
    weights = lax.all_gather(topk_weights, shapes.axis_name, tiled=True)
    return _sum_rows(shapes, rows, weights, received.plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows(shapes: Shapes, tokens: jax.Array, grouping: Grouping) -> jax.Array:
    everyones = lax.all_gather(as_bits(tokens), shapes.axis_name, tiled=True)
    rows = take(everyones, grouping.choice_of_row // shapes.top_k)
    return as_floats(rows, tokens.dtype)


def _gather_rows_fwd(shapes: Shapes, tokens: jax.Array, grouping: Grouping) -> tuple:
    return _gather_rows(shapes, tokens, grouping), grouping


def _gather_rows_bwd(shapes: Shapes, grouping: Grouping, d_rows: jax.Array) -> tuple:
    return _sum_choices(shapes, d_rows, None, grouping), None


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_rows(
    shapes: Shapes, rows: jax.Array, weights: jax.Array, grouping: Grouping
) -> jax.Array:
    return _sum_choices(shapes, rows, weights, grouping)


def _sum_choices(
    shapes: Shapes, rows: jax.Array, weights: jax.Array | None, grouping: Grouping
) -> jax.Array:
    row_of_choice = grouping.row_of_choice.reshape(-1, shapes.top_k)
    total = weighted_sum(as_bits(rows), row_of_choice, weights, rows.dtype)
    total = lax.psum_scatter(total, shapes.axis_name, scatter_dimension=0, tiled=True)
    return total.astype(rows.dtype)


def _sum_rows_fwd(
    shapes: Shapes, rows: jax.Array, weights: jax.Array, grouping: Grouping
) -> tuple:
    return _sum_rows(shapes, rows, weights, grouping), (rows, weights, grouping)


def _sum_rows_bwd(shapes: Shapes, saved: tuple, d_out: jax.Array) -> tuple:
    rows, weights, grouping = saved
    dtype, capacity = rows.dtype, shapes.capacity
    d_outs = lax.all_gather(as_bits(d_out), shapes.axis_name, tiled=True)
    token = grouping.choice_of_row // shapes.top_k

    weight = take(weights.reshape(-1), grouping.choice_of_row)
    in_use = jnp.arange(capacity) < grouping.n_rows
    d_rows = take_float32(d_outs, token, dtype) * weight[:, None]
    d_rows = jnp.where(in_use[:, None], d_rows, 0).astype(dtype)

    def dots(begin: int, end: int) -> jax.Array:
        row = rows[begin:end].astype(F32)
        return dot_each(row, take_float32(d_outs, token[begin:end], dtype))

    dot_of_row = used_blocks(dots, capacity, grouping.n_rows)
    has_row = grouping.row_of_choice < capacity
    d_weights = jnp.where(has_row, take(dot_of_row, grouping.row_of_choice), 0)
    return d_rows, d_weights.reshape(weights.shape), None


_sum_rows.defvjp(_sum_rows_fwd, _sum_rows_bwd)
