"""Baseline `all_gather`: every rank gets all tokens and picks its experts' rows.

In combine, each rank sums its weighted rows of each token in one fused loop of K gathers;
`psum_scatter` adds up the ranks' sums: on GPUs in bfloat16, which halves the bytes and rounds at
each hop, and on CPUs in float32, which is faster there.

As in the package, the backward pass of each is the other (`custom_vjp`); JAX's own derivative would
scatter rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from baselines.grouping import Grouping, Received, Shapes, group, received, take
from baselines.rows import (
    F32,
    as_bits,
    as_floats,
    dot_each,
    take_float32,
    used_blocks,
    weighted_sum,
)


def dispatch(shapes: Shapes, tokens: jax.Array, topk_ids: jax.Array) -> Received:
    """Rows in the contract's order, out of all ranks' tokens."""
    plan = group(shapes, topk_ids)
    return received(shapes, _gather_rows(shapes, tokens, plan), topk_ids, plan, plan)


def combine(
    shapes: Shapes, rows: jax.Array, received: Received, topk_weights: jax.Array
) -> jax.Array:
    """`[T, H]`; weights are applied at the experts' ranks."""
    weights = lax.all_gather(topk_weights, shapes.axis_name, tiled=True)
    return _sum_rows(shapes, rows, weights, received.plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows(shapes: Shapes, tokens: jax.Array, plan: Grouping) -> jax.Array:
    everyones = lax.all_gather(as_bits(tokens), shapes.axis_name, tiled=True)
    rows = take(everyones, plan.choice_of_row // shapes.top_k)
    return as_floats(rows, tokens.dtype)


def _sum_choices(
    shapes: Shapes, rows: jax.Array, weights: jax.Array | None, plan: Grouping
) -> jax.Array:
    row_of_choice = plan.row_of_choice.reshape(-1, shapes.top_k)
    total = weighted_sum(as_bits(rows), row_of_choice, weights, rows.dtype)
    total = total.astype(rows.dtype) if shapes.on_gpu else total
    total = lax.psum_scatter(total, shapes.axis_name, scatter_dimension=0, tiled=True)
    return total.astype(rows.dtype)


def _sum_rows_bwd(shapes: Shapes, saved: tuple, d_out: jax.Array) -> tuple:
    rows, weights, plan = saved
    dtype, capacity = rows.dtype, shapes.capacity
    d_outs = lax.all_gather(as_bits(d_out), shapes.axis_name, tiled=True)
    token = plan.choice_of_row // shapes.top_k
    n_rows = jnp.minimum(plan.first_rows[-1], capacity)

    weight = take(weights.reshape(-1), plan.choice_of_row)
    d_rows = take_float32(d_outs, token, dtype) * weight[:, None]
    in_use = jnp.arange(capacity) < n_rows
    d_rows = jnp.where(in_use[:, None], d_rows, 0).astype(dtype)

    def dots(begin: int, end: int) -> jax.Array:
        cotangents = take_float32(d_outs, token[begin:end], dtype)
        return dot_each(rows[begin:end].astype(F32), cotangents, shapes.on_gpu)

    if shapes.on_gpu:  # each `cond` of `used_blocks` would wait for the host
        dot = dots(0, capacity)
    else:
        dot = used_blocks(dots, capacity, n_rows)
    has_row = plan.row_of_choice < capacity
    d_weights = jnp.where(has_row, take(dot, plan.row_of_choice), 0)
    return d_rows, d_weights.reshape(weights.shape), None


_gather_rows.defvjp(
    lambda shapes, tokens, plan: (_gather_rows(shapes, tokens, plan), plan),
    lambda shapes, plan, d_rows: (_sum_choices(shapes, d_rows, None, plan), None),
)
_sum_rows = jax.custom_vjp(_sum_choices, nondiff_argnums=(0,))
_sum_rows.defvjp(lambda *args: (_sum_choices(*args), args[1:]), _sum_rows_bwd)
