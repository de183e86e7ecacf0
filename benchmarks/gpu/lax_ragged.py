"""Rival `ragged_all_to_all`: rows sorted by expert, sent and regrouped, and back.

One all_gather of every rank's counts and sorted choices replaces an exchange of sizes:
from it each rank knows what to send where, where it lands, and `src_info`. A slab is
what one rank sends to one other: sorted by expert, so that the regrouping is a gather.
Rows beyond the capacity are the last of their slab and are not sent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gpu.lax_all_gather import count_invalid
from lax_grouping import Received, Shapes, Sorted, sort_own_choices
from lax_rows import I32, as_bits, take, weighted_sum


class Slabs(NamedTuple):
    """Sizes and places of the slabs, as `jax.lax.ragged_all_to_all` takes them."""

    own_start: jax.Array  # int32[R], of those sent, in the own sorted choices
    own_size: jax.Array  # int32[R]
    own_place: jax.Array  # int32[R], of those sent, where they arrive
    size: jax.Array  # int32[R], of those received
    start: jax.Array  # int32[R]
    home: jax.Array  # int32[R], where those received stand in their source's choices


class Plan(NamedTuple):
    """For combine."""

    slabs: Slabs
    row_of_slot: jax.Array  # int32[C], slots number the rows as they arrive
    place: jax.Array  # int32[T, K], of own choices in their order; T * K = not sent


def dispatch(shapes: Shapes, tokens: jax.Array, topk_ids: jax.Array) -> Received:
    """Rows in the contract's order, out of one slab from each rank."""
    own = sort_own_choices(shapes, topk_ids)
    message = lax.all_gather(jnp.concatenate([own.order, own.start]), shapes.axis_name)
    orders, starts = jnp.split(message, [shapes.n_choices], axis=1)
    counts = jnp.diff(starts, axis=1)  # [R, E]
    kept, ends = _keep(shapes, counts)
    slabs = _slabs(shapes, starts, kept)

    sent = take(tokens, own.order // shapes.top_k)
    arrived = _send(sent, shapes.capacity, slabs, shapes.axis_name)
    slot_of_row, source, place = _regroup(shapes, kept, slabs, starts, ends)
    choice = take(orders.reshape(-1), source * shapes.n_choices + place)
    row_of_slot = jnp.zeros(shapes.capacity, I32)
    row_of_slot = row_of_slot.at[slot_of_row].set(
        jnp.arange(shapes.capacity, dtype=I32), mode="drop", unique_indices=True
    )
    n_wanted = ends[-1, -1]
    first_rows = jnp.concatenate([jnp.zeros(1, I32), ends[:, -1]])
    return Received(
        tokens=take(arrived, slot_of_row),
        row_offsets=jnp.minimum(first_rows, shapes.capacity).astype(jnp.uint32),
        src_info=jnp.stack([choice // shapes.top_k, choice % shapes.top_k], axis=1),
        n_dropped=jnp.maximum(n_wanted - shapes.capacity, 0),
        n_invalid=count_invalid(shapes, topk_ids),
        plan=Plan(slabs, row_of_slot, _places(shapes, own, slabs)),
    )


def combine(
    shapes: Shapes, rows: jax.Array, received: Received, topk_weights: jax.Array
) -> jax.Array:
    """`[T, H]`, weighted at the source."""
    slabs, row_of_slot, place = received.plan
    back = Slabs(
        own_start=slabs.start,
        own_size=slabs.size,
        own_place=slabs.home,
        size=slabs.own_size,
        start=slabs.own_start,
        home=slabs.own_place,
    )
    sent = take(rows, row_of_slot)
    choices = _send(sent, shapes.n_choices, back, shapes.axis_name)
    total = weighted_sum(as_bits(choices), place, topk_weights, rows.dtype)
    return total.astype(rows.dtype)


def _keep(shapes: Shapes, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of all ranks, int32[R, E]: what each receiver has room for.

    And where the rows of this rank's (expert, source) end, int32[L, R].
    """
    by_receiver = counts.T.reshape(shapes.n_ranks, -1)  # (expert, source) in row order
    ends = jnp.cumsum(by_receiver, axis=1)
    kept = jnp.clip(shapes.capacity - (ends - by_receiver), 0, by_receiver)
    kept = kept.reshape(shapes.n_experts, shapes.n_ranks).T
    rank = lax.axis_index(shapes.axis_name)
    return kept, ends[rank].reshape(shapes.n_local_experts, shapes.n_ranks)


def _slabs(shapes: Shapes, starts: jax.Array, kept: jax.Array) -> Slabs:
    n_ranks, rank = shapes.n_ranks, lax.axis_index(shapes.axis_name)
    sizes = kept.reshape(n_ranks, n_ranks, -1).sum(axis=2)  # [source, receiver]
    places = jnp.cumsum(sizes, axis=0) - sizes
    firsts = starts[:, : -1 : shapes.n_local_experts]  # [source, receiver]
    return Slabs(
        own_start=firsts[rank],
        own_size=sizes[rank],
        own_place=places[rank],
        size=sizes[:, rank],
        start=places[:, rank],
        home=firsts[:, rank],
    )


def _send(rows: jax.Array, n_out: int, slabs: Slabs, axis_name: str) -> jax.Array:
    """`[n_out, H]`; what no slab fills is unspecified."""
    out = lax.empty((n_out, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(
        rows,
        out,
        slabs.own_start,
        slabs.own_size,
        slabs.own_place,
        slabs.size,
        axis_name=axis_name,
    )


def _regroup(
    shapes: Shapes, kept: jax.Array, slabs: Slabs, starts: jax.Array, ends: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row: its slot (C = not in use), its source, its place there."""
    n_local, rank = shapes.n_local_experts, lax.axis_index(shapes.axis_name)
    here = lax.dynamic_slice_in_dim(kept, rank * n_local, n_local, axis=1).T  # [L, R]
    within = jnp.cumsum(here, axis=0) - here  # rows before an expert's in the slab
    row = jnp.arange(shapes.capacity, dtype=I32)
    part = jnp.searchsorted(
        ends.reshape(-1), row, side="right", method="scan_unrolled"
    ).astype(I32)
    source = part % shapes.n_ranks
    first_row = take((ends - jnp.diff(_own(starts, rank, n_local)).T).reshape(-1), part)
    step = take(within.reshape(-1), part) + row - first_row
    in_use = row < jnp.minimum(ends[-1, -1], shapes.capacity)
    slot = jnp.where(in_use, take(slabs.start, source) + step, shapes.capacity)
    return slot, source, take(slabs.home, source) + step


def _own(starts: jax.Array, rank: jax.Array, n_local: int) -> jax.Array:
    """`[R, L + 1]`: where each source's choices of this rank's experts start."""
    return lax.dynamic_slice_in_dim(starts, rank * n_local, n_local + 1, axis=1)


def _places(shapes: Shapes, own: Sorted, slabs: Slabs) -> jax.Array:
    """`[T, K]`: own choices' places in the sorted list; T * K where not sent."""
    rank = own.experts // shapes.n_local_experts
    within = own.place - take(slabs.own_start, rank)
    is_sent = (rank < shapes.n_ranks) & (within < take(slabs.own_size, rank))
    return jnp.where(is_sent, own.place, shapes.n_choices).reshape(-1, shapes.top_k)
