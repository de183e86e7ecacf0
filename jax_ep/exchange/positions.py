"""The position of each choice among those of the same expert; the order that a sort gives."""

import jax
import jax.numpy as jnp
from jax import lax

# Choices of a block, in which each is compared with all before it; a sort takes longer, also on
# CPUs. So few choices that one block takes less than counts of several blocks do.
_BLOCK, _ONE_BLOCK = 64, 1024


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
