"""Balance: which rank takes which choices, so that no rank of a node gets more rows than a quota.

The quota is 1/32 above the mean. Ranks that would get more give parts of their experts' rows to
ranks that would get fewer, and lend them these experts. Two lines, laid beside each other, say what
goes where:

* what is given: homes by surplus, the largest first; of each home its largest experts first, as
  many whole ones as the surplus holds and a part of the next one;
* what is taken: ranks by room below the quota, the most first.

A rank takes the pieces of experts that lie beside its room, the first `expert_copies` of them; what
it has no slot for stays at home. All that follows from the counts of choices by rank and expert, in
integers, so every rank makes the same plan. The oracle says the same by loops:
tests/support/oracle_balance.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.config import SLACK
from jax_ep.exchange.choices import order_of, positions
from jax_ep.geometry import Geometry


class Plan(NamedTuple):
    """Who takes how many choices of each expert."""

    copies: jax.Array  # int32[R, B]: the expert that each slot holds; -1 = none
    rows: jax.Array  # int32[R, E]: choices of each expert that each rank takes
    slots: jax.Array  # int32[R, E]: the slot of an expert that is not at home; else unspecified


def make_plan(counts: jax.Array, n_ranks: int, n_slots: int, limit: int) -> Plan:
    """The plan of the ranks of one node.

    Args:
        counts: `int32[E]`, choices of each of their experts, of all tokens.
        n_ranks: R, of the node.
        n_slots: copies that a rank has room for (B).
        limit: what no sum of counts exceeds.
    """
    by_home = counts.reshape(n_ranks, -1)
    loads = by_home.sum(axis=1, dtype=jnp.int32)
    mean = (loads.sum(dtype=jnp.int32) - 1) // n_ranks + 1
    quota = mean + mean // SLACK
    experts, given = _given(by_home, loads, quota, limit)
    takers = order_of(loads, limit + 1)
    beside = _overlap(jnp.maximum(quota - loads[takers], 0), given)
    slots = jnp.cumsum(beside > 0, axis=1, dtype=jnp.int32) - 1
    is_taken = (beside > 0) & (slots < n_slots)
    at = takers[:, None], experts[None]
    moved = jnp.zeros((n_ranks, counts.size), jnp.int32).at[at].set(jnp.where(is_taken, beside, 0))
    home = lax.iota(jnp.int32, counts.size) // by_home.shape[1]
    is_home = home[None] == lax.iota(jnp.int32, n_ranks)[:, None]
    held = takers[:, None], jnp.where(is_taken, slots, n_slots)  # beyond the last: none
    return Plan(
        copies=jnp.full((n_ranks, n_slots), -1, jnp.int32).at[held].set(experts[None], mode="drop"),
        rows=moved + jnp.where(is_home, counts - moved.sum(axis=0, dtype=jnp.int32), 0),
        slots=jnp.zeros_like(moved).at[at].set(slots),
    )


def _given(
    by_home: jax.Array, loads: jax.Array, quota: jax.Array, limit: int
) -> tuple[jax.Array, jax.Array]:
    """`int32[E]` each: experts in the order in which they are given, and how many rows of each."""
    givers = order_of(limit - loads, limit + 1)
    largest_first = order_of(limit - by_home, limit + 1)[givers]
    sizes = by_home[givers[:, None], largest_first]
    surplus = jnp.maximum(loads[givers] - quota, 0)[:, None]
    given = jnp.clip(surplus - _before(sizes), 0, sizes)
    return (givers[:, None] * by_home.shape[1] + largest_first).reshape(-1), given.reshape(-1)


def _before(sizes: jax.Array) -> jax.Array:
    """Where pieces of these sizes begin, laid end to end along the last axis."""
    return jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes


def _overlap(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """`[R, C]`: what the pieces of two lines have in common."""
    begins = jnp.maximum(_before(rows)[:, None], _before(columns)[None])
    ends = jnp.minimum(jnp.cumsum(rows)[:, None], jnp.cumsum(columns)[None])
    return jnp.maximum(ends - begins, 0)


def balance(
    geometry: Geometry, experts: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rank and the group there, without a shared expert's, that each choice goes to.

    Of an expert's choices, as many as a rank takes come from its own tokens, the first ones. The
    others, in the order of source rank, token and k, fill what is left of the ranks' shares, in the
    order of ranks.

    Args:
        geometry: of the group.
        experts: `int32[n]`, the experts that this rank's tokens choose; others than `[0, E)` get
            unspecified results.
        counts: `int32[R, E]`, the choices of each expert by the tokens of each rank.

    Returns:
        `int32[n]` each: rank and local group; and `int32[R, B]`, the expert that each rank's slots
        hold, -1 for none.
    """
    plan = _plan_of_nodes(geometry, counts)
    n_experts, n_local = counts.shape[1], geometry.n_local_experts
    rank = lax.axis_index(geometry.axis_name)
    own = jnp.minimum(counts, plan.rows)
    sent, free = counts - own, plan.rows - own
    begins = jnp.cumsum(sent, axis=0, dtype=jnp.int32) - sent
    ends = jnp.cumsum(free, axis=0, dtype=jnp.int32)
    expert = jnp.clip(experts, 0, n_experts - 1)
    turn = positions(experts, n_experts)
    at = begins[rank][expert] + turn - own[rank][expert]
    other = (ends[:, expert] <= at[None]).sum(axis=0, dtype=jnp.int32)
    to = jnp.where(turn < own[rank][expert], rank, other)
    group = jnp.where(to == expert // n_local, expert % n_local, n_local + plan.slots[to, expert])
    return to, group, plan.copies


def _plan_of_nodes(geometry: Geometry, counts: jax.Array) -> Plan:
    """The plans of all nodes: copies stay on the node of their home."""
    config, n_ranks = geometry.config, geometry.n_ranks
    per_node, n_nodes = config.nodes(n_ranks)
    totals = counts.sum(axis=0, dtype=jnp.int32).reshape(n_nodes, -1)
    limit = config.max_choices(n_ranks)
    plans = jax.vmap(lambda each: make_plan(each, per_node, config.expert_copies, limit))(totals)
    first = lax.broadcasted_iota(jnp.int32, plans.copies.shape, 0) * totals.shape[1]
    copies = jnp.where(plans.copies < 0, -1, plans.copies + first)
    rows, slots = (
        jnp.where(jnp.eye(n_nodes, dtype=bool)[:, None, :, None], x[:, :, None], 0)
        for x in (plans.rows, plans.slots)
    )
    return Plan(*(x.reshape(n_ranks, -1) for x in (copies, rows, slots)))
