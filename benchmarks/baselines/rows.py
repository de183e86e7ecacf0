"""Gathers and sums of rows in plain `jax.lax`, in the forms that XLA compiles best.

Rows of 16-bit floats are gathered and sent as uint16. Otherwise XLA:CPU converts a bfloat16 gather
to float32 and back, which takes 2 to 4 times as long.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from baselines.grouping import take

F32 = jnp.float32

_MIN_BLOCK_ROWS = 2048
_MAX_BLOCKS = 16


def as_bits(x: jax.Array) -> jax.Array:
    """16-bit floats as uint16; other dtypes unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def as_floats(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `as_bits`."""
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype != dtype else bits


def take_float32(bits: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of floats that are stored as bits, in float32."""
    return as_floats(take(bits, index), dtype).astype(F32)


def weighted_sum(
    bits: jax.Array, index: jax.Array, weights: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """float32 `[n, H]`: sum over k of `weights[:, k] * rows[index[:, k]]`, in order.

    Choices whose index is beyond the rows add nothing. One gather per choice, fused into the sum,
    takes a tenth of the time of a scatter-add of the rows.
    """
    total = jnp.zeros((index.shape[0], bits.shape[1]), F32)
    for k in range(index.shape[1]):
        addend = take_float32(bits, index[:, k], dtype)
        if weights is not None:
            addend = addend * weights[:, k, None]
        total += jnp.where((index[:, k] < bits.shape[0])[:, None], addend, 0)
    return total


def dot_each(x: jax.Array, y: jax.Array, on_gpu: bool) -> jax.Array:
    """Dot product of each pair of rows.

    XLA:CPU computes a matrix product with ones faster than a sum. XLA:GPU fuses the sum, but would
    write the elementwise products to memory for a matmul.
    """
    return jnp.sum(x * y, axis=1) if on_gpu else (x * y) @ jnp.ones(x.shape[1], F32)


def used_blocks(
    function: Callable[[int, int], jax.Array], n_rows: int, n_used: jax.Array
) -> jax.Array:
    """`function(begin, end)` over all rows; zeros for blocks that are not in use.

    For XLA:CPU. Uses a `cond` per block, not a loop over the blocks in use: out of a loop, XLA
    would hoist conversions of all rows.
    """
    n_blocks = max(1, min(_MAX_BLOCKS, n_rows // _MIN_BLOCK_ROWS))
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
