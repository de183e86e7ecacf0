"""Turns `topk_ids` into the group ids that transports route by.

A group is the rows of one expert on one rank. Three features are expressed here, so that no
transport needs a special case for row order, offsets, padding, scales or drops:

* A fused shared expert is one more group of each rank, the first, and one more choice of each
  token, the last, which names that group on the token's own rank.
* With `skip_a2a`, each rank exchanges tokens with itself alone, and other ranks' experts have no
  groups.
* Copies of other ranks' experts (`expert_copies`) are the last groups of each rank; balance.py says
  which choices go there.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.balance import balance
from jax_ep.exchange.choices import count_choices
from jax_ep.geometry import Geometry

NO_GROUP = -1
INVALID = -2


class Choices(NamedTuple):
    """What the tokens of a rank chose, and what balances the ranks."""

    topk_ids: jax.Array  # int32[..., K]
    copies: jax.Array | None  # int32[R, B]: experts that ranks have copies of, -1 for none


def route(
    geometry: Geometry,
    topk_ids: jax.Array,
    balance_choices: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array | None]:
    """The group ids of each token's choices, and `Choices.copies`.

    `balance_choices`: as below, by the transport, for groups with copies.
    """
    if geometry.config.expert_copies:
        ids, copies = balance_choices(topk_ids)
        return _with_shared(geometry, ids), copies
    return route_ids(geometry, topk_ids), None


def route_ids(geometry: Geometry, topk_ids: jax.Array) -> jax.Array:
    """The group ids of each token's choices: `int32[T, N]` from `int32[T, K]`, -1 for none.

    Group `i` of rank `r` has the id `r * n_local_groups + i`. Invalid ids stay outside `[-1, G)`.
    """
    config = geometry.config
    if not (config.fused_shared_expert or config.skip_a2a):
        return topk_ids
    n_local, n_shared = geometry.n_local_experts, int(config.fused_shared_expert)
    is_expert, ids = _experts(geometry, topk_ids)
    if not config.skip_a2a:
        ids = ids + (ids // n_local + 1) * n_shared
        return _with_shared(geometry, _group_ids(geometry, topk_ids, is_expert, ids))
    is_here = is_expert & (ids // n_local == lax.axis_index(geometry.axis_name))
    ids = _group_ids(geometry, topk_ids, is_here, ids % n_local + n_shared)
    return _with_shared(geometry, ids)


def balance_choices(
    geometry: Geometry, topk_ids: jax.Array, all_gather: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The group ids of choices, `int32[T, K]`, without a shared expert's, and `Choices.copies`.

    Ranks tell each other how often their tokens chose each expert, by an `all_gather`.
    """
    config = geometry.config
    is_expert, ids = _experts(geometry, topk_ids)
    counts = all_gather(count_choices(topk_ids, config.n_experts))
    experts = jnp.where(is_expert, ids, config.n_experts).reshape(-1)
    rank, local, copies = balance(geometry, experts, counts)
    ids = rank * geometry.routed.n_local_groups + int(config.fused_shared_expert) + local
    return _group_ids(geometry, topk_ids, is_expert, ids.reshape(topk_ids.shape)), copies


def _experts(geometry: Geometry, topk_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which ids name an expert, and ids that do."""
    is_expert = (topk_ids >= 0) & (topk_ids < geometry.config.n_experts)
    return is_expert, jnp.where(is_expert, topk_ids, 0)


def _group_ids(
    geometry: Geometry, topk_ids: jax.Array, has_group: jax.Array, ids: jax.Array
) -> jax.Array:
    """The ids where a choice has a group."""
    is_invalid = (topk_ids < NO_GROUP) | (topk_ids >= geometry.config.n_experts)
    return jnp.where(has_group, ids, jnp.where(is_invalid, INVALID, NO_GROUP))


def _with_shared(geometry: Geometry, ids: jax.Array) -> jax.Array:
    """The ids of a token's choices; a shared expert's come last."""
    if not geometry.config.fused_shared_expert:
        return ids
    return jnp.concatenate([ids, _shared_group_ids(geometry, ids.shape[0])], axis=1)


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
