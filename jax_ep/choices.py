"""What transports route: `topk_ids`, made so that they know no special cases.

A fused shared expert is one more local expert of each rank, the first, and one more
choice of each token, the last: that of its own rank's. Where all ranks hold all tokens
(`skip_a2a`), a rank is alone, and other ranks' experts are no experts. So the order of
rows, their offsets, padding and scales, and what is dropped, need no other rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax_ep.group import EPGroup

NO_EXPERT = -1
_INVALID = -2


def route_ids(group: EPGroup, topk_ids: jax.Array) -> jax.Array:
    """`int32[T, K + se]`: the groups of rows that a token goes to, -1 for none.

    Group `g` of rank `r` is `r * group._routed.n_groups + g`. Ids that are not in
    `[-1, E)` stay outside.
    """
    config = group.config
    if not (config.fused_shared_expert or config.skip_a2a):
        return topk_ids
    n_local, n_shared = group.n_local_experts, int(config.fused_shared_expert)
    is_expert = (topk_ids >= 0) & (topk_ids < config.n_experts)
    ids = jnp.where(is_expert, topk_ids, 0)
    rank = lax.axis_index(group.axis_name)
    is_routed = is_expert
    if config.skip_a2a:
        is_routed = is_expert & (ids // n_local == rank)
        ids = ids % n_local + n_shared
    else:
        ids = ids + (ids // n_local + 1) * n_shared
    is_valid = is_expert | (topk_ids == NO_EXPERT)
    ids = jnp.where(is_routed, ids, jnp.where(is_valid, NO_EXPERT, _INVALID))
    if not config.fused_shared_expert:
        return ids
    return jnp.concatenate([ids, _shared_ids(group, topk_ids.shape[0])], axis=1)


def route_weights(group: EPGroup, weights: jax.Array | None) -> jax.Array | None:
    """`float32[T, K + se]`: the shared expert's is 1."""
    if weights is None or not group.config.fused_shared_expert:
        return weights
    return jnp.pad(weights, ((0, 0), (0, 1)), constant_values=1)


def _shared_ids(group: EPGroup, n_tokens: int) -> jax.Array:
    """`int32[T, 1]`: this rank's first group; -1 for the tokens of other ranks."""
    rank = lax.axis_index(group.axis_name)
    if not group.config.skip_a2a:
        return jnp.full((n_tokens, 1), rank * group._routed.n_groups)
    each, rest = divmod(n_tokens, group.n_ranks)  # the first ranks have one more
    begin, end = (r * each + jnp.minimum(r, rest) for r in (rank, rank + 1))
    token = jnp.arange(n_tokens, dtype=jnp.int32)[:, None]
    is_here = (token >= begin) & (token < end)
    return jnp.where(is_here, jnp.zeros_like(token), NO_EXPERT)
