"""fetch_experts: the weights of all groups of rows, with copies of other ranks' experts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.copies import Lent, check_leaf, lend, lend_gradients
from jax_ep.group import calls_of, check_group
from jax_ep.results import Dispatched, check_dispatched


def fetch_experts(dispatched: Dispatched, weights: Any) -> Any:
    """Brings the weights of the experts that a dispatch has lent to this rank; in `jax.shard_map`.

    For experts of your own; `expert_mlp` fetches by itself. Differentiable: the gradient of an
    expert is the sum over its home and its copies in the order of ranks, in float32 (float64 for
    float64), rounded once. It has the same bits in every run. The results have the name
    `EXPERT_COPIES_NAME` for policies of `jax.checkpoint`: without them, weights travel again for
    the backward.

    Args:
        dispatched: the result of dispatch.
        weights: a pytree of arrays `[L + se, ...]`, the weights of this rank's experts in any
            dtype. Integers, and numbers of fewer than 16 bits such as the codes of
            `quantize_weights`, have no gradient.

    Returns:
        `[L + se + B, ...]`: an entry for each group of rows. Those of copies without rows are
        unspecified. `weights`, if `config.expert_copies` is 0.

    Raises:
        TypeError: `dispatched` is not the result of dispatch, or a leaf of `weights` not an array.
            While tracing.
        ValueError: the leading dimension of a leaf of `weights` is not L + se; the group is closed,
            or the call is outside `jax.shard_map`. While tracing.
    """
    check_dispatched("fetch_experts", dispatched)
    group = dispatched.group
    call = check_group("fetch_experts", group)
    n_local, n_shared = group.n_local_experts, int(group.config.fused_shared_expert)
    letters = "L+se" if n_shared else "L"
    weights = jax.tree.map(lambda x: check_leaf(call, x, n_local + n_shared, letters), weights)
    if dispatched.copies is None:
        return weights
    own, copies, _ = lend_experts(dispatched, weights)
    is_lent = dispatched.copies[lax.axis_index(group.axis_name)] >= 0

    def join(own: jax.Array, copies: jax.Array) -> jax.Array:
        has_one = is_lent.reshape(-1, *(1,) * (copies.ndim - 1))
        # Others may be NaN, which `lax.ragged_dot` multiplies also for groups without rows.
        return jnp.concatenate([own, jnp.where(has_one, copies, jnp.zeros((), copies.dtype))])

    return jax.tree.map(join, own, copies)


def lend_experts(dispatched: Dispatched, weights: Any) -> Lent:
    """`weights`, which fit, and `[B, ...]` of the experts that are lent to this rank."""
    group, copies = dispatched.group, dispatched.copies
    assert copies is not None
    n_shared = int(group.config.fused_shared_expert)
    copies, row_offsets = lax.stop_gradient((copies, dispatched.row_offsets))
    return lend(calls_of(group), weights, copies, n_shared, after=row_offsets)


def fetch_gradients(dispatched: Dispatched, weights: jax.Array) -> jax.Array:
    """`fetch_experts` of an array whose values nobody reads: zeros stand for those of copies."""
    group, copies = dispatched.group, dispatched.copies
    assert copies is not None
    n_shared = int(group.config.fused_shared_expert)
    parts = lend_gradients(calls_of(group), weights, lax.stop_gradient(copies), n_shared)
    return jnp.concatenate(parts)
