"""Grouped matmuls in plain JAX, for platforms without a kernel.

`lax.ragged_dot` is a dense matmul over all groups there. These functions loop over the groups that
have rows, and over tiles of their rows, so the work is proportional to the rows in use.

16-bit floats are sliced and selected as integers: XLA:CPU handles bfloat16 as float32, and would
convert whole arrays for each tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim

from jax_ep.exchange.checks import vary_alike
from jax_ep.exchange.choices import order_of


def rows_by_weights(
    rows: jax.Array,
    weights: jax.Array,
    row_offsets: jax.Array,
    *,
    transposed: bool,
    dtype: Any,
    kept: jax.Array | None = None,
) -> jax.Array:
    """`[C, N]`: the rows of each group, `[C, K]`, times its weights, `[L, K, N]`.

    With `transposed`, weights are `[L, N, K]`. Accumulated in float32 and rounded once, to `dtype`.
    `row_offsets`, `uint32[L + 1]`, do not decrease and are at most C. Unused rows may hold NaN;
    those of the result are those of `kept`, or zero.
    """
    n_rows, n_groups = rows.shape[0], weights.shape[0]
    out = kept
    if out is None:
        out = jnp.zeros((n_rows, weights.shape[1 if transposed else 2]), dtype)
    if n_rows == 0 or n_groups == 0:
        return out
    rows, weights, row_offsets, out = vary_alike((), rows, weights, row_offsets, out)
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def add_group(group: jax.Array, begin: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        matrix = _take(weights, group, 1)[0]

        def add_tile(size: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, out = carry
            start, in_group = _tile(first, end, size, n_rows)
            new = lax.dot_general(
                _take(rows, start, size), matrix, dims, preferred_element_type=jnp.float32
            )
            old = lax.dynamic_slice_in_dim(out, start, size)
            new = jnp.where(in_group, _bits(new.astype(dtype)), old)
            return first + size, lax.dynamic_update_slice_in_dim(out, new, start, 0)

        large, small = _tile_sizes(n_rows, n_groups)
        carry = lax.while_loop(
            lambda carry: end - carry[0] > small, lambda carry: add_tile(large, carry), (begin, out)
        )
        carry = lax.while_loop(
            lambda carry: carry[0] < end, lambda carry: add_tile(small, carry), carry
        )
        return carry[1]

    return _from_bits(_loop_over_groups(row_offsets, add_group, _bits(out)), dtype)


def rows_by_rows(
    lhs: jax.Array,
    rhs: jax.Array,
    row_offsets: jax.Array,
    *,
    dtype: Any,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """`[L, K, N]`: for each group, its rows of `lhs`, `[C, K]`, transposed, times those of `rhs`.

    `rhs` is `[C, N]`; all else as in `rows_by_weights`. Zero for groups without rows. An
    `accumulator`, of float32, is what the products are added to, of groups that have rows.
    """
    n_rows, n_groups = lhs.shape[0], row_offsets.shape[0] - 1
    out = accumulator
    if out is None:
        out = jnp.zeros((n_groups, lhs.shape[1], rhs.shape[1]), dtype)
    if n_rows == 0 or n_groups == 0:
        return out
    lhs, rhs, row_offsets, out = vary_alike((), lhs, rhs, row_offsets, out)
    dims = (((0,), (0,)), ((), ()))
    large, small = _tile_sizes(n_rows, n_groups)

    def multiply(size: int, first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        start, in_group = _tile(first, end, size, n_rows)
        x, y = (jnp.where(in_group, _take(x, start, size), jnp.float32(0)) for x in (lhs, rhs))
        return first + size, lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)

    def add_group(group: jax.Array, begin: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        def next_tile(first: jax.Array) -> tuple[jax.Array, jax.Array]:
            return lax.cond(
                end - first > small,
                lambda: multiply(large, first, end),
                lambda: multiply(small, first, end),
            )

        def add_tile(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, product = next_tile(carry[0])
            return first, carry[1] + product

        _, total = lax.while_loop(lambda carry: carry[0] < end, add_tile, next_tile(begin))
        if accumulator is not None:
            total = lax.dynamic_index_in_dim(out, group, 0, keepdims=False) + total
        return lax.dynamic_update_index_in_dim(out, _bits(total.astype(dtype)), group, 0)

    return _from_bits(_loop_over_groups(row_offsets, add_group, _bits(out)), dtype)


def _loop_over_groups(
    row_offsets: jax.Array, add_group: Callable[..., jax.Array], out: jax.Array
) -> jax.Array:
    """`out` after `add_group(group, first row, end, out)` for each group that has rows."""
    row_offsets = row_offsets.astype(jnp.int32)
    has_rows = row_offsets[1:] > row_offsets[:-1]
    groups = order_of(~has_rows, 2)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        group = groups[i]
        return add_group(group, row_offsets[group], row_offsets[group + 1], out)

    return lax.fori_loop(0, jnp.sum(has_rows, dtype=jnp.int32), body, out)


def _tile_sizes(n_rows: int, n_groups: int) -> tuple[int, int]:
    """Rows of a tile, and of a tile that ends a group: near the mean group, and a quarter of it.

    `jax.export` may leave the number of rows open: tiles are then as large as any.
    """
    large = 256
    if isinstance(n_rows, int):
        large = min(max(1 << (-(-n_rows // n_groups) - 1).bit_length(), 16), large)
    return min_dim(large, n_rows), min_dim(max(large // 4, 8), n_rows)


def _tile(first: jax.Array, end: jax.Array, size: int, n_rows: int) -> tuple[jax.Array, jax.Array]:
    """Where to slice a tile that begins at row `first`; `[size, 1]`, which of its rows count."""
    start = jnp.minimum(first, n_rows - size)
    row = start + lax.iota(jnp.int32, size)
    return start, ((row >= first) & (row < end))[:, None]


def _take(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`float32` of `x[start : start + size]`.

    A matmul of float32 is faster on CPUs than one of 16-bit floats, and as exact. The barrier keeps
    XLA from converting all of `x` before the loop.
    """
    x, start = lax.optimization_barrier((x, start))
    bits = lax.dynamic_slice_in_dim(_bits(x), start, size)
    return _from_bits(bits, x.dtype).astype(jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    """16-bit floats as integers; others as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_bits`."""
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype == jnp.uint16 else bits
