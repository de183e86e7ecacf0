"""Rival `all_to_all`: padded slabs of rows, one row per (token, choice), both ways.

A slab is what one rank sends to one other. It has the worst case's size, as the
contract drops no row for what one pair of ranks sends. (With one copy per (token, rank)
instead, a slab would hold T rows: the bytes of an all_gather, and more work.) Combine
sends the rows back and adds up at the source.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lax_grouping import (
    Grouping,
    Received,
    Shapes,
    Sorted,
    exchange_and_merge,
    received,
    sort_own_choices,
)
from lax_rows import (
    F32,
    I32,
    as_bits,
    as_floats,
    dot_each,
    take,
    take_float32,
    weighted_sum,
)


class Plan(NamedTuple):
    """Who sends what where. Slots number the rows of all slabs."""

    choice_of_slot: jax.Array  # int32[R * slab], own choices sent; any where none
    slot_of_choice: jax.Array  # int32[T, K], own; R * slab = none
    slot_of_row: jax.Array  # int32[C], of the slabs received
    row_of_slot: jax.Array  # int32[R * slab], of the slabs received; C = none


def dispatch(shapes: Shapes, tokens: jax.Array, topk_ids: jax.Array) -> Received:
    """Rows in the contract's order, out of one slab from each rank."""
    own = sort_own_choices(shapes, topk_ids)
    grouping = exchange_and_merge(shapes, own)
    plan = _plan_slabs(shapes, own, grouping)
    rows = _send_rows(shapes, tokens, plan)
    return received(shapes, rows, topk_ids, grouping, plan)


def combine(
    shapes: Shapes, rows: jax.Array, received: Received, topk_weights: jax.Array
) -> jax.Array:
    """`[T, H]`, weighted at the source."""
    return _return_rows(shapes, rows, topk_weights, received.plan)


def _plan_slabs(shapes: Shapes, own: Sorted, grouping: Grouping) -> Plan:
    n_ranks, slab = shapes.n_ranks, shapes.slab_rows
    bounds = own.start[:: shapes.n_local_experts]  # [R + 1], in the sorted choices
    place = bounds[:-1, None] + jnp.arange(slab, dtype=I32)

    rank = own.experts // shapes.n_local_experts  # R = none
    slot = own.place - take(bounds, rank)
    is_sent = (rank < n_ranks) & (slot < slab)
    slot_of_choice = jnp.where(is_sent, rank * slab + slot, n_ranks * slab)

    source = jnp.arange(n_ranks * shapes.n_choices, dtype=I32) // shapes.n_choices
    slot = source * slab + grouping.slot  # meaningful where the choice has a row
    has_row = grouping.row_of_choice < shapes.capacity
    row_of_slot = jnp.full(n_ranks * slab, shapes.capacity, I32)
    row_of_slot = row_of_slot.at[jnp.where(has_row, slot, n_ranks * slab)].set(
        grouping.row_of_choice, mode="drop", unique_indices=True
    )
    return Plan(
        choice_of_slot=take(own.order, place).reshape(-1),
        slot_of_choice=slot_of_choice.reshape(-1, shapes.top_k),
        slot_of_row=take(slot, grouping.choice_of_row),
        row_of_slot=row_of_slot,
    )


def _exchange(shapes: Shapes, slabs: jax.Array) -> jax.Array:
    """`[R * slab, H]` by destination to the same by source."""
    slabs = slabs.reshape(shapes.n_ranks, shapes.slab_rows, -1)
    slabs = lax.all_to_all(slabs, shapes.axis_name, 0, 0, tiled=True)
    return slabs.reshape(shapes.n_ranks * shapes.slab_rows, -1)


def _fetch(shapes: Shapes, rows: jax.Array, plan: Plan) -> jax.Array:
    """Bits of the rows of own choices, by slot; zero where a choice has no row."""
    has_row = (plan.row_of_slot < shapes.capacity)[:, None]
    return _exchange(
        shapes, jnp.where(has_row, take(as_bits(rows), plan.row_of_slot), 0)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_rows(shapes: Shapes, tokens: jax.Array, plan: Plan) -> jax.Array:
    slabs = take(as_bits(tokens), plan.choice_of_slot // shapes.top_k)
    rows = take(_exchange(shapes, slabs), plan.slot_of_row)
    return as_floats(rows, tokens.dtype)


def _send_rows_fwd(shapes: Shapes, tokens: jax.Array, plan: Plan) -> tuple:
    return _send_rows(shapes, tokens, plan), plan


def _send_rows_bwd(shapes: Shapes, plan: Plan, d_rows: jax.Array) -> tuple:
    slabs, dtype = _fetch(shapes, d_rows, plan), d_rows.dtype
    return weighted_sum(slabs, plan.slot_of_choice, None, dtype).astype(dtype), None


_send_rows.defvjp(_send_rows_fwd, _send_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _return_rows(
    shapes: Shapes, rows: jax.Array, weights: jax.Array, plan: Plan
) -> jax.Array:
    return _return_rows_fwd(shapes, rows, weights, plan)[0]


def _return_rows_fwd(
    shapes: Shapes, rows: jax.Array, weights: jax.Array, plan: Plan
) -> tuple:
    slabs, dtype = _fetch(shapes, rows, plan), rows.dtype
    out = weighted_sum(slabs, plan.slot_of_choice, weights, dtype).astype(dtype)
    return out, (slabs, weights, plan)


def _return_rows_bwd(shapes: Shapes, saved: tuple, d_out: jax.Array) -> tuple:
    slabs, weights, plan = saved
    dtype, n_slots = d_out.dtype, slabs.shape[0]
    token = plan.choice_of_slot // shapes.top_k
    weight = take(weights.reshape(-1), plan.choice_of_slot)
    sent = take_float32(as_bits(d_out), token, dtype) * weight[:, None]
    d_rows = take(_exchange(shapes, as_bits(sent.astype(dtype))), plan.slot_of_row)
    in_use = jnp.arange(shapes.capacity) < jnp.sum(plan.row_of_slot < shapes.capacity)
    d_rows = as_floats(jnp.where(in_use[:, None], d_rows, 0), dtype)

    def dots(slot: jax.Array) -> jax.Array:
        return dot_each(take_float32(slabs, slot, dtype), d_out.astype(F32))

    d_weights = jnp.stack([dots(slot) for slot in plan.slot_of_choice.T], axis=1)
    return d_rows, jnp.where(plan.slot_of_choice < n_slots, d_weights, 0), None


_return_rows.defvjp(_return_rows_fwd, _return_rows_bwd)
