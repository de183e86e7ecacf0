"""Choices of experts: how many each expert gets, a limit on them, and their order by expert."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.exchange.checks import as_arrays, as_int32, check_array

_INT32_MAX = 2**31 - 1
# Choices of a block, in which each is compared with all before it; a sort takes longer, also on
# CPUs. So few choices that one block takes less than counts of several blocks do.
_BLOCK, _ONE_BLOCK = 64, 1024


def count_choices(topk_ids: jax.Array, n_experts: int) -> jax.Array:
    """The number of choices of each expert.

    Args:
        topk_ids: `[..., K]`, global experts: integers of any dtype. Ids outside `[0, E)` count for
            no expert.
        n_experts: experts over all ranks (E).

    Returns:
        `int32[E]`, over the given tokens: under `jax.shard_map`, those of this rank. The experts'
        load is the sum over ranks, by `jax.lax.psum`.

    Raises:
        ValueError: `topk_ids` are not integers, or `n_experts` is no count. While tracing.
    """
    experts, is_expert = _experts("count_choices", topk_ids, n_experts)
    return _count(experts, is_expert, n_experts)


def limit_choices(
    topk_ids: jax.Array, n_experts: int, capacity: int, *, axis_name: Any = ()
) -> jax.Array:
    """Drops the choices of each expert beyond the first `capacity`, in the order of token, then k.

    This is the expert capacity of Switch Transformer (https://arxiv.org/abs/2101.03961), applied to
    the tokens of each rank. With K > 1, first choices have no priority over others, unlike in
    GShard:

        capacity = math.ceil(Fraction(str(factor)) * T * K / E)
        topk_ids = jax_ep.limit_choices(topk_ids, E, capacity)
        rows = jax_ep.dispatch(group, tokens, topk_ids)

    An expert then gets at most `R * capacity` rows. `fractions.Fraction` is exact, and takes the
    factor for the decimal number that it prints as; in floating point, 1.1 * 100 / 2 is above 55.

    With `axis_name`, the capacity counts the choices of all ranks along these axes together, in the
    order of rank, then token, then k. An expert that is popular on one rank only then keeps more
    choices. It gets at most `capacity` rows, and earlier ranks come first:

        capacity = math.ceil(Fraction(str(factor)) * R * T * K / E)
        topk_ids = jax_ep.limit_choices(topk_ids, E, capacity, axis_name="ep")

    Args:
        topk_ids: `[..., K]`, as for `count_choices`.
        n_experts: as for `count_choices` (E).
        capacity: choices that an expert keeps, 0 for none; static.
        axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of axes, over whose ranks the
            capacity counts, in the order of `jax.lax.axis_index`. Communicates: one
            `jax.lax.all_gather` of `int32[E]`. Leave out axes along which the tokens are the same.
            (): each rank counts its own choices.

    Returns:
        `int32[..., K]`: `topk_ids`, with -1 in place of what is dropped. Ids outside `[0, E)` stay.

    Raises:
        ValueError: `topk_ids` are not integers, `n_experts` or `capacity` no count, `axis_name` no
            axis of the `jax.shard_map`, or the choices of all ranks do not fit in int32. While
            tracing.
    """
    capacity = min(_as_count("limit_choices", "capacity", capacity), _INT32_MAX)
    experts, is_expert = _experts("limit_choices", topk_ids, n_experts)
    counts = _count(experts, is_expert, n_experts + 1)
    room = _room(counts, experts.size, capacity, axis_name)
    is_dropped = is_expert & (positions(experts, n_experts + 1) >= room[experts])
    (ids,) = as_arrays("limit_choices", topk_ids=topk_ids)
    return jnp.where(is_dropped.reshape(ids.shape), -1, as_int32(ids))


def _room(counts: jax.Array, n_choices: int, capacity: int, axis_name: Any) -> jax.Array:
    """`int32[E + 1]`, what earlier ranks leave of each expert's capacity; may be negative."""
    axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if axis_name == ():
        return jnp.full_like(counts, capacity)
    try:
        n_all = n_choices * lax.axis_size(axis_name)
    except (NameError, TypeError):
        raise ValueError(
            "limit_choices: axis_name must be an axis, or a tuple of axes, of the jax.shard_map "
            f"around the call; got {axis_name!r}. Leave it out to count the choices of each rank."
        ) from None
    if n_all > _INT32_MAX:
        raise ValueError(
            f"limit_choices: the choices of all ranks along axis_name={axis_name!r} must fit in "
            f"int32; got {n_all}. Count over fewer ranks."
        )
    by_rank = lax.all_gather(counts, axis_name)
    is_earlier = jnp.arange(len(by_rank)) < lax.axis_index(axis_name)
    earlier = jnp.where(is_earlier[:, None], by_rank, 0).sum(axis=0, dtype=jnp.int32)
    return capacity - earlier


def _experts(operation: str, topk_ids: Any, n_experts: int) -> tuple[jax.Array, jax.Array]:
    """`int32[n]` of all choices, E for those that name no expert; and which ones name one."""
    n_experts = _as_count(operation, "n_experts", n_experts)
    (ids,) = as_arrays(operation, topk_ids=topk_ids)
    shape = (None,) * max(1, 0 if ids is None else ids.ndim)
    check_array(operation, "topk_ids", ids, shape, "K", jnp.integer)
    ids = lax.stop_gradient(as_int32(ids)).reshape(-1)
    is_expert = (ids >= 0) & (ids < n_experts)
    return jnp.where(is_expert, ids, n_experts), is_expert


def _count(experts: jax.Array, is_expert: jax.Array, n_experts: int) -> jax.Array:
    counts = jnp.zeros(n_experts, jnp.int32)
    return counts.at[experts].add(is_expert.astype(jnp.int32), mode="drop")


def _as_count(operation: str, name: str, value: Any) -> int:
    """An integer that is not negative."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < 0:
        raise ValueError(f"{operation}: {name} must be an integer, 0 or more; got {value!r}.")
    return int(value)


def positions(experts: jax.Array, n_experts: int) -> jax.Array:
    """`int32[n]` of `int32[n]`: how many earlier choices are of the same expert.

    Unspecified for experts outside `[0, n_experts)`.
    """
    n_choices = experts.shape[0]
    size = _BLOCK if n_choices > _ONE_BLOCK else n_choices
    n_blocks = -(-n_choices // max(size, 1))
    blocks = jnp.pad(experts, (0, n_blocks * size - n_choices), constant_values=n_experts)
    blocks = blocks.reshape(n_blocks, size)
    index = lax.iota(jnp.int32, size)
    is_earlier = index[None, :, None] > index[None, None, :]
    is_same = blocks[:, :, None] == blocks[:, None, :]
    found = (is_same & is_earlier).sum(-1, dtype=jnp.int32)
    if n_blocks > 1:
        blocks = blocks.astype(jnp.uint32)  # negative ones are beyond all experts
        block = lax.broadcasted_iota(jnp.uint32, blocks.shape, 0)
        counts = jnp.zeros((n_blocks, n_experts), jnp.int32).at[block, blocks].add(1, mode="drop")
        before = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
        found += before.at[block, blocks].get(mode="clip")
    return found.reshape(-1)[:n_choices]


def order_of(keys: jax.Array, n_keys: int) -> jax.Array:
    """`int32[..., n]`: `jnp.argsort(keys, stable=True)`, of integers in `[0, n_keys)`.

    A sort of one operand, if that fits in int32: where the sorted keys of `jnp.argsort` are unused,
    XLA may not know their sharding, and aborts (`jax_use_shardy_partitioner=False`).
    """
    n = keys.shape[-1]
    if n_keys * n >= 2**31:
        return jnp.argsort(keys, axis=-1, stable=True).astype(jnp.int32)
    index = lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    return jnp.sort(keys.astype(jnp.int32) * n + index) % max(n, 1)
