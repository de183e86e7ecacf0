"""The primitive that adds the products of groups of rows to an accumulator, in place.

On GPUs, it is the custom call of grouped matmuls with one more operand.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_ep.ffi.lowering import like, make_primitive
from jax_ep.layer import matmul_tiles
from jax_ep.layer.matmul import Matmul, MatmulForm, by_ragged_dot, call_kernel, has_kernel, inside

PRODUCTS = Matmul(MatmulForm.ROWS, np.dtype(np.float32))
_ACCUMULATOR = 3  # the operand


def add_products(
    lhs: jax.Array, rhs: jax.Array, row_offsets: jax.Array, accumulator: jax.Array
) -> jax.Array:
    """`float32[L, K, N]`: of each group, the accumulator plus its rows of `lhs.T` times `rhs`.

    One float32 addition per element, after the sum over the rows; none for groups without rows.
    """
    return add_products_p.bind(lhs, rhs, row_offsets, accumulator)[0]


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any) -> Any:
    if not has_kernel(ctx.avals_in[:_ACCUMULATOR], ctx.avals_out[0], PRODUCTS):
        return _lower_dense(ctx, *operands)
    return call_kernel(ctx, *operands, matmul=PRODUCTS, aliases={_ACCUMULATOR: 0})


def _by_tiles(
    lhs: jax.Array, rhs: jax.Array, row_offsets: jax.Array, accumulator: jax.Array
) -> list[jax.Array]:
    row_offsets = inside(row_offsets, lhs)
    dtype = accumulator.dtype
    return [matmul_tiles.rows_by_rows(lhs, rhs, row_offsets, dtype=dtype, accumulator=accumulator)]


def _by_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, row_offsets: jax.Array, accumulator: jax.Array
) -> list[jax.Array]:
    (products,) = by_ragged_dot(lhs, rhs, row_offsets, matmul=PRODUCTS)
    row_offsets = inside(row_offsets, lhs)
    has_rows = (row_offsets[1:] > row_offsets[:-1])[:, None, None]
    return [jnp.where(has_rows, accumulator + products, accumulator)]


_lower_dense = mlir.lower_fun(_by_ragged_dot, multiple_results=True)
add_products_p = make_primitive(
    "jax_ep_add_products", cpu=mlir.lower_fun(_by_tiles, multiple_results=True), cuda=_lower_cuda
)
mlir.register_lowering(add_products_p, _lower_dense)


@add_products_p.def_abstract_eval
def _result_types(lhs: Any, rhs: Any, row_offsets: Any, accumulator: Any) -> Any:
    return [like(lhs, accumulator.shape, accumulator.dtype)]
