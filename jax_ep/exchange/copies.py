"""Weights of experts on ranks that are not their home, and the sums of the gradients of all copies.

Experts travel in rounds. In each, every rank offers one of its home experts to all ranks, by an
all-gather, and each rank keeps what it has a copy of. So a rank needs memory for R experts at a
time, not for all E; and only experts that have a copy away from home are offered. The device alone
knows how many rounds that takes: as many as the rank that has the most such experts needs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange import checks
from jax_ep.exchange.base import Calls
from jax_ep.exchange.choices import order_of
from jax_ep.formats.bits import from_bytes, to_bytes

# Name of experts' weights that have traveled, for `jax.checkpoint` policies.
EXPERT_COPIES_NAME = "jax_ep_expert_copies"
_NO_GRADIENT: Any = None  # what custom_vjp expects for integers


class _Rounds(NamedTuple):
    """What travels in which round; slots are those of this rank, 0 to S - 1."""

    n_rounds: jax.Array  # int32[]
    offered: jax.Array  # int32[R, E / R]: the home expert that each rank offers in each round
    n_offered: jax.Array  # int32[R]: rounds in which it offers one
    copies: jax.Array  # int32[E]: this rank's slot that has a copy of each expert; S: none
    homes: jax.Array  # int32[S]: the position at home of what each slot holds


def replicate(calls: Calls, weights: Any, held: jax.Array, n_experts: int) -> Any:
    """`[S, ...]` of each array `[E / R, ...]`, the weights of what this rank's slots hold.

    Differentiable: the gradient of an expert is the sum over the ranks that hold it, in their
    order.

    Args:
        calls: of the group.
        weights: a pytree of arrays, those of this rank's experts.
        held: `int32[R, S]`, the expert that each slot of each rank holds; -1 for none, whose
            weights are unspecified. A rank holds an expert at most once.
        n_experts: E.
    """
    rounds = _plan(calls, held, n_experts)

    def move(leaf: jax.Array) -> jax.Array:
        # Replicas may hold different experts: then their copies of equal weights differ, too.
        leaf, _ = checks.vary_alike(calls.geometry.axis_names, leaf, held)
        if checks.is_code(leaf.dtype) and leaf.dtype != jnp.uint8:  # collectives may not know it
            codes = to_bytes(lax.stop_gradient(leaf))
            return from_bytes(_move(calls, codes, rounds), leaf.dtype)
        is_number = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (_replicate if is_number else _move)(calls, leaf, rounds)

    return checkpoint_name(jax.tree.map(move, weights), EXPERT_COPIES_NAME)


def check_leaf(operation: str, leaf: Any, n_experts: int, letters: str) -> jax.Array:
    """Requires an array `[n_experts, ...]` of numbers."""
    (leaf,) = checks.as_arrays(operation, weights=leaf)
    shape = (n_experts, *(None,) * max(0, leaf.ndim - 1))
    names = " ".join([letters, *("..." for _ in shape[1:])])
    checks.check_array(operation, "weights", leaf, shape, names, jnp.floating, jnp.integer)
    return leaf


def _plan(calls: Calls, held: jax.Array, n_experts: int) -> _Rounds:
    n_ranks, n_slots = held.shape
    n_home = n_experts // n_ranks
    ranks = lax.broadcasted_iota(jnp.int32, held.shape, 0)
    experts = lax.broadcasted_iota(jnp.int32, (1, n_experts), 1)
    is_away = (held // n_home != ranks).reshape(-1, 1)
    travels = (is_away & (held.reshape(-1, 1) == experts)).any(0).reshape(n_ranks, n_home)
    n_offered = travels.sum(1, dtype=jnp.int32)
    rank = lax.axis_index(calls.geometry.axis_name)
    mine = lax.dynamic_index_in_dim(held, rank, keepdims=False)
    is_copy = mine[:, None] == experts
    return _Rounds(
        n_rounds=n_offered.max(),
        offered=order_of(~travels, 2),
        n_offered=n_offered,
        copies=jnp.where(is_copy.any(0), is_copy.argmax(0), n_slots).astype(jnp.int32),
        homes=mine % n_home,
    )


def _offers(calls: Calls, rounds: _Rounds, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each rank in round i: the home expert that it offers, this rank's copy of it.

    Both are one beyond the last if it offers none, the latter also if this rank has no copy.
    """
    n_ranks, n_home = rounds.offered.shape
    n_local = len(rounds.homes)
    offered = lax.dynamic_index_in_dim(rounds.offered, i, axis=1, keepdims=False)
    offers_one = i < rounds.n_offered
    copies = rounds.copies[lax.iota(jnp.int32, n_ranks) * n_home + offered]
    return jnp.where(offers_one, offered, n_home), jnp.where(offers_one, copies, n_local)


def _move(calls: Calls, weights: jax.Array, rounds: _Rounds) -> jax.Array:
    """`[S, ...]` of `[E / R, ...]`."""
    rank, n_ranks = lax.axis_index(calls.geometry.axis_name), calls.geometry.n_ranks
    beyond = len(rounds.homes) + lax.iota(jnp.int32, n_ranks)  # each but once, none written

    def exchange(i: jax.Array, copies: jax.Array) -> jax.Array:
        offered, local = _offers(calls, rounds, i)
        mine = weights.at[offered[rank]].get(mode="clip")
        theirs = calls.all_gather(mine)
        local = jnp.where(local < len(rounds.homes), local, beyond)
        return copies.at[local].set(theirs, mode="drop", unique_indices=True)

    # What is not at home here, is overwritten.
    return lax.fori_loop(0, rounds.n_rounds, exchange, weights[rounds.homes])


def _add_up(calls: Calls, gradients: jax.Array, rounds: _Rounds) -> jax.Array:
    """`[E / R, ...]` of `[S, ...]`: the sums over copies."""
    rank = lax.axis_index(calls.geometry.axis_name)
    n_home = rounds.offered.shape[1]
    n_local = len(rounds.homes)

    def take(local: jax.Array) -> jax.Array:
        is_here = (local < n_local).reshape(-1, *[1] * (gradients.ndim - 1))
        return jnp.where(is_here, gradients.at[local].get(mode="clip"), 0)

    def exchange(i: jax.Array, sums: jax.Array) -> jax.Array:
        offered, local = _offers(calls, rounds, i)
        of_ranks = calls.all_to_all(take(local))
        return sums.at[offered[rank]].set(_sum_in_order(of_ranks), mode="drop")

    at_home = lax.dynamic_slice_in_dim(rounds.copies, rank * n_home, n_home)
    return lax.fori_loop(0, rounds.n_rounds, exchange, take(at_home))


def _sum_in_order(values: jax.Array) -> jax.Array:
    """The sum over the first axis, one after the other; `jnp.sum` may take any order."""
    dtype = jnp.float64 if values.dtype == jnp.float64 else jnp.float32
    return functools.reduce(jnp.add, values.astype(dtype)).astype(values.dtype)


# Each is the other's transpose.
_replicate = jax.custom_vjp(_move, nondiff_argnums=(0,))
_sum_copies = jax.custom_vjp(_add_up, nondiff_argnums=(0,))
_replicate.defvjp(
    lambda calls, weights, rounds: (_replicate(calls, weights, rounds), rounds),
    lambda calls, rounds, gradients: (_sum_copies(calls, gradients, rounds), _NO_GRADIENT),
)
_sum_copies.defvjp(
    lambda calls, gradients, rounds: (_sum_copies(calls, gradients, rounds), rounds),
    lambda calls, rounds, weights: (_replicate(calls, weights, rounds), _NO_GRADIENT),
)
