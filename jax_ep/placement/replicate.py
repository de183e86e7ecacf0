"""replicate_experts: the weights of a rank's physical experts, from where logical ones are stored.

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
from jax_ep.exchange.choices import order_of
from jax_ep.formats.bits import from_bytes, to_bytes
from jax_ep.group import EPGroup, calls_of, check_group
from jax_ep.placement.expert_placement import ExpertPlacement, check_placement

# Name of the results of `replicate_experts`, for `jax.checkpoint` policies.
EXPERT_COPIES_NAME = "jax_ep_expert_copies"
_NO_GRADIENT: Any = None  # what custom_vjp expects for integers


class _Rounds(NamedTuple):
    """What travels in which round; local experts are physical ones of this rank, 0 to P / R - 1."""

    n_rounds: jax.Array  # int32[]
    offered: jax.Array  # int32[R, E / R]: the home expert that each rank offers in each round
    n_offered: jax.Array  # int32[R]: rounds in which it offers one
    copies: jax.Array  # int32[E]: this rank's local expert that is a copy of each; P / R: none
    homes: jax.Array  # int32[P / R]: the position at home of what each local expert is a copy of


def replicate_experts(group: EPGroup, weights: Any, placement: ExpertPlacement) -> Any:
    """Brings the weights of logical experts to the ranks of their copies; in `jax.shard_map`.

    Differentiable, any number of times: the gradient of a logical expert is the sum of its copies'
    gradients in ascending order of physical experts, in float32 (float64 for float64),
    rounded once. It has the same bits in every run.

    Let n be the number of experts with a copy away from home, on the home rank that has the most of
    them. Each rank receives `n * (R - 1)` experts, and in the backward their gradients; `rebalance`
    keeps n small. Beside the results, that takes memory for 2 R experts. They travel by collectives
    of XLA or, on `host`, by calls of the group. The results have the name `EXPERT_COPIES_NAME`:
    `jax.checkpoint` keeps them for the backward if its policy says so, and otherwise the weights
    travel again.

    Args:
        group: of `n_experts` = P; the weights travel along its axes.
        weights: a pytree of arrays `[E / R, ...]`: the weights of the logical experts from
            `rank * E / R` on, in any dtype. Integers, and numbers of fewer than 16 bits such as the
            codes of `quantize_weights`, have no gradient.
        placement: which expert is where; the same on all ranks.

    Returns:
        `[P / R, ...]`: the weights of this rank's physical experts, as `expert_mlp` takes them.

    Raises:
        TypeError: `group` is not a group, `placement` not an `ExpertPlacement`, or a leaf of
            `weights` not an array. While tracing.
        ValueError: the leading dimension of a leaf of `weights` is not E / R; the placement does
            not fit the group; the group is closed, or the call is outside `jax.shard_map`. While
            tracing.
    """
    call = check_group("replicate_experts", group)
    check_placement(call, group, placement)
    rounds = _plan(group, placement)

    def move(leaf: Any) -> jax.Array:
        leaf = _check_leaf(call, leaf, placement.n_experts // group.n_ranks)
        (leaf,) = checks.vary_alike(group.geometry.axis_names, leaf)
        if checks.is_code(leaf.dtype) and leaf.dtype != jnp.uint8:  # collectives may not know it
            codes = to_bytes(lax.stop_gradient(leaf))
            return from_bytes(_move(group, codes, rounds), leaf.dtype)
        is_number = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (_replicate if is_number else _move)(group, leaf, rounds)

    return checkpoint_name(jax.tree.map(move, weights), EXPERT_COPIES_NAME)


def _check_leaf(call: str, leaf: Any, n_home: int) -> jax.Array:
    (leaf,) = checks.as_arrays(call, weights=leaf)
    shape = (n_home, *(None,) * max(0, leaf.ndim - 1))
    names = " ".join(["E/R", *("..." for _ in shape[1:])])
    checks.check_array(call, "weights", leaf, shape, names, jnp.floating, jnp.integer)
    return leaf


def _plan(group: EPGroup, placement: ExpertPlacement) -> _Rounds:
    n_ranks, n_experts = group.n_ranks, placement.n_experts
    n_home, n_local = n_experts // n_ranks, group.n_local_experts
    logical = placement.physical_to_logical.reshape(n_ranks, n_local)
    ranks = lax.broadcasted_iota(jnp.int32, logical.shape, 0)
    experts = lax.broadcasted_iota(jnp.int32, (1, n_experts), 1)
    is_away = (logical // n_home != ranks).reshape(-1, 1)
    travels = (is_away & (logical.reshape(-1, 1) == experts)).any(0).reshape(n_ranks, n_home)
    n_offered = travels.sum(1, dtype=jnp.int32)
    held = lax.dynamic_index_in_dim(logical, lax.axis_index(group.axis_name), keepdims=False)
    is_copy = held[:, None] == experts
    return _Rounds(
        n_rounds=n_offered.max(),
        offered=order_of(~travels, 2),
        n_offered=n_offered,
        copies=jnp.where(is_copy.any(0), is_copy.argmax(0), n_local).astype(jnp.int32),
        homes=held % n_home,
    )


def _offers(group: EPGroup, rounds: _Rounds, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each rank in round i: the home expert that it offers, this rank's copy of it.

    Both are one beyond the last if it offers none, the latter also if this rank has no copy.
    """
    n_ranks, n_home = rounds.offered.shape
    n_local = len(rounds.homes)
    offered = lax.dynamic_index_in_dim(rounds.offered, i, axis=1, keepdims=False)
    offers_one = i < rounds.n_offered
    copies = rounds.copies[lax.iota(jnp.int32, n_ranks) * n_home + offered]
    return jnp.where(offers_one, offered, n_home), jnp.where(offers_one, copies, n_local)


def _move(group: EPGroup, weights: jax.Array, rounds: _Rounds) -> jax.Array:
    """`[P / R, ...]` of `[E / R, ...]`."""
    rank = lax.axis_index(group.axis_name)
    beyond = len(rounds.homes) + lax.iota(jnp.int32, group.n_ranks)  # each but once, none written

    def exchange(i: jax.Array, copies: jax.Array) -> jax.Array:
        offered, local = _offers(group, rounds, i)
        mine = weights.at[offered[rank]].get(mode="clip")
        theirs = calls_of(group).all_gather(mine)
        local = jnp.where(local < len(rounds.homes), local, beyond)
        return copies.at[local].set(theirs, mode="drop", unique_indices=True)

    # What is not at home here, is overwritten.
    return lax.fori_loop(0, rounds.n_rounds, exchange, weights[rounds.homes])


def _add_up(group: EPGroup, gradients: jax.Array, rounds: _Rounds) -> jax.Array:
    """`[E / R, ...]` of `[P / R, ...]`: the sums over copies."""
    rank = lax.axis_index(group.axis_name)
    n_home = rounds.offered.shape[1]
    n_local = len(rounds.homes)

    def take(local: jax.Array) -> jax.Array:
        is_here = (local < n_local).reshape(-1, *[1] * (gradients.ndim - 1))
        return jnp.where(is_here, gradients.at[local].get(mode="clip"), 0)

    def exchange(i: jax.Array, sums: jax.Array) -> jax.Array:
        offered, local = _offers(group, rounds, i)
        of_ranks = calls_of(group).all_to_all(take(local))
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
    lambda group, weights, rounds: (_replicate(group, weights, rounds), rounds),
    lambda group, rounds, gradients: (_sum_copies(group, gradients, rounds), _NO_GRADIENT),
)
_sum_copies.defvjp(
    lambda group, gradients, rounds: (_sum_copies(group, gradients, rounds), rounds),
    lambda group, rounds, weights: (_replicate(group, weights, rounds), _NO_GRADIENT),
)
