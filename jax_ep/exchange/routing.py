"""Turns `topk_ids` into the group ids that transports route by.

A group is the rows of one expert on one rank. Two features are expressed here, so that no transport
needs a special case for row order, offsets, padding, scales or drops:

* A fused shared expert is one more group of each rank, the first, and one more choice of each
  token, the last, which names that group on the token's own rank.
* With `skip_a2a`, each rank exchanges tokens with itself alone, and other ranks' experts have no
  groups.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.geometry import Geometry

NO_GROUP = -1
INVALID = -2


def route_ids(geometry: Geometry, topk_ids: jax.Array) -> jax.Array:
    """The group ids of each token's choices: `int32[T, N]` from `int32[T, K]`, -1 for none.

    Group `i` of rank `r` has the id `r * n_local_groups + i`. Invalid ids stay outside `[-1, G)`.
    """
    config = geometry.config
    if not (config.fused_shared_expert or config.skip_a2a):
        return topk_ids
    n_local, n_shared = geometry.n_local_experts, int(config.fused_shared_expert)
    is_expert = (topk_ids >= 0) & (topk_ids < config.n_experts)
    ids = jnp.where(is_expert, topk_ids, 0)
    is_routed = is_expert
    if config.skip_a2a:
        rank = lax.axis_index(geometry.axis_name)
        is_routed = is_expert & (ids // n_local == rank)
        ids = ids % n_local + n_shared
    else:
        ids = ids + (ids // n_local + 1) * n_shared
    is_valid = is_expert | (topk_ids == NO_GROUP)
    ids = jnp.where(is_routed, ids, jnp.where(is_valid, NO_GROUP, INVALID))
    if not config.fused_shared_expert:
        return ids
    shared_ids = _shared_group_ids(geometry, topk_ids.shape[0])
    return jnp.concatenate([ids, shared_ids], axis=1)


def route_weights(geometry: Geometry, topk_weights: jax.Array | None) -> jax.Array | None:
    """`float32[T, N]`: the weights, and 1 for a shared expert."""
    if topk_weights is None or not geometry.config.fused_shared_expert:
        return topk_weights
    return jnp.pad(topk_weights, ((0, 0), (0, 1)), constant_values=1)


def _shared_group_ids(geometry: Geometry, n_tokens: int) -> jax.Array:
    """`int32[T, 1]`: this rank's first group; -1 for tokens that other ranks take."""
    rank = lax.axis_index(geometry.axis_name)
    if not geometry.config.skip_a2a:
        return jnp.full((n_tokens, 1), rank * geometry.routed.n_local_groups)
    each, rest = divmod(n_tokens, geometry.n_ranks)  # the first ranks take one more
    begin, end = (r * each + jnp.minimum(r, rest) for r in (rank, rank + 1))
    token = jnp.arange(n_tokens, dtype=jnp.int32)[:, None]
    is_here = (token >= begin) & (token < end)
    return jnp.where(is_here, jnp.zeros_like(token), NO_GROUP)


def split_shared(rows: jax.Array, group_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[C, H]` without the shared expert's rows, zeros in their place, and these, `[T, H]`.

    combine rounds a token's sum before it adds the shared expert's row. Where sums travel in
    another dtype than that of the result, this happens after the call.

    They come first, in the order of the tokens that the last choice gives to this rank's shared
    expert. -0, which changes no sum, stands for a row that is missing.
    """
    is_here = group_ids[:, -1] >= 0
    n_shared = jnp.sum(is_here, dtype=jnp.int32)
    row = jnp.where(is_here, jnp.cumsum(is_here, dtype=jnp.int32) - 1, rows.shape[0])
    shared = rows.at[row].get(mode="fill", fill_value=-0.0)
    is_shared = jnp.arange(rows.shape[0], dtype=jnp.int32) < n_shared
    return jnp.where(is_shared[:, None], jnp.zeros((), rows.dtype), rows), shared
