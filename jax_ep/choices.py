"""Choices of experts before a dispatch: how many each expert gets, and a limit on them."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.checks import as_arrays, as_int32


def count_choices(topk_ids: jax.Array, n_experts: int) -> jax.Array:
    """The number of choices of each expert.

    Args:
        topk_ids: `[..., K]`, global experts: integers of any dtype. Ids outside `[0, E)` count for
            no expert.
        n_experts: experts over all ranks (E).

    Returns:
        `int32[E]`, of these tokens: those of this rank under `jax.shard_map`. The experts' load is
        the sum over ranks, by `jax.lax.psum`.
    """
    experts, is_expert = _experts(topk_ids, n_experts)
    return jnp.zeros(n_experts, jnp.int32).at[experts].add(is_expert.astype(jnp.int32), mode="drop")


def limit_choices(topk_ids: jax.Array, n_experts: int, capacity: int) -> jax.Array:
    """Drops the choices of each expert beyond the first `capacity`, in the order of token, then k.

    The capacity of experts in GShard and Switch Transformer, `factor * T * K / E` for the T tokens
    of each rank:

        topk_ids = jax_ep.limit_choices(topk_ids, config.n_experts, capacity)
        rows = jax_ep.dispatch(group, tokens, topk_ids)

    An expert then gets at most `R * capacity` rows.

    Args:
        topk_ids: `[..., K]`, global experts: integers of any dtype.
        n_experts: experts over all ranks (E).
        capacity: choices that an expert keeps; static.

    Returns:
        `int32[..., K]`: `topk_ids`, with -1 in place of what is dropped. Ids outside `[0, E)` stay.

    Raises:
        ValueError: `capacity` is negative.
    """
    if capacity < 0:
        raise ValueError(f"limit_choices: capacity must not be negative; got {capacity}.")
    experts, is_expert = _experts(topk_ids, n_experts)
    order = jnp.argsort(experts, stable=True)
    position = jnp.zeros_like(experts).at[order].set(jnp.arange(experts.size, dtype=jnp.int32))
    counts = count_choices(topk_ids, n_experts)
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts  # position of each expert's first choice
    is_dropped = is_expert & (position - first.at[experts].get(mode="clip") >= capacity)
    (ids,) = as_arrays(topk_ids)
    return jnp.where(is_dropped.reshape(ids.shape), -1, as_int32(ids))


def _experts(topk_ids: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array]:
    """`int32[n]` of all choices, E for those that name no expert; and which ones name one."""
    (ids,) = as_arrays(topk_ids)
    ids = lax.stop_gradient(as_int32(ids)).reshape(-1)
    is_expert = (ids >= 0) & (ids < n_experts)
    return jnp.where(is_expert, ids, n_experts), is_expert
