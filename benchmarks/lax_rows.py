"""Rows in plain `jax.lax`, the way XLA:CPU does them fastest. Used by the rivals.

16-bit floats are gathered and sent as uint16: XLA:CPU turns a bfloat16 gather into
float32 and back, which takes 2 to 4 times as long.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

I32, F32 = jnp.int32, jnp.float32

_MIN_BLOCK_ROWS = 2048
_MAX_BLOCKS = 16


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of `x`; any entry where the index is out of range."""
    index = jnp.clip(index, 0, x.shape[0] - 1)
    return x.at[index].get(mode="promise_in_bounds")


def as_bits(x: jax.Array) -> jax.Array:
    """16-bit floats as uint16; the rest as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def as_floats(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `as_bits`."""
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype != dtype else bits


def take_float32(bits: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of floats that are stored as bits, in float32."""
    return as_floats(take(bits, index), dtype).astype(F32)


def weighted_sum(
    bits: jax.Array,
    index: jax.Array,
    weights: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """float32 `[n, H]`: sum over k of `weights[:, k] * rows[index[:, k]]`, in order.

    Choices with an index beyond the rows add nothing. A gather per choice, fused into
    the sum, takes a tenth of the time of a scatter-add of the rows.
    """
    total = jnp.zeros((index.shape[0], bits.shape[1]), F32)
    for k in range(index.shape[1]):
        terms = take_float32(bits, index[:, k], dtype)
        if weights is not None:
            terms = terms * weights[:, k, None]
        total += jnp.where((index[:, k] < bits.shape[0])[:, None], terms, 0)
    return total


def dot_each(x: jax.Array, y: jax.Array) -> jax.Array:
    """Dot product of each pair of rows; faster as a product with ones than as a sum."""
    return (x * y) @ jnp.ones(x.shape[1], F32)


def used_blocks(
    function: Callable[[int, int], jax.Array], n_rows: int, n_used: jax.Array
) -> jax.Array:
    """`function(begin, end)` for all rows, but zeros for blocks that are not in use.

    A `cond` for each block, and not a loop over the blocks in use: XLA would hoist
    conversions of all rows out of the loop.
    """
    n_blocks = max(1, min(_MAX_BLOCKS, n_rows // _MIN_BLOCK_ROWS))
    if n_blocks == 1:
        return function(0, n_rows)
    size = -(-n_rows // n_blocks)
    parts = []
    for begin in range(0, n_rows, size):
        end = min(begin + size, n_rows)
        parts.append(
            lax.cond(
                begin < n_used,
                lambda begin=begin, end=end: function(begin, end),
                lambda begin=begin, end=end: jnp.zeros(end - begin, F32),
            )
        )
    return jnp.concatenate(parts)
