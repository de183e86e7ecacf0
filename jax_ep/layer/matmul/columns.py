"""Grouped matmuls along columns, the gradient of weights in FP8: a kernel on Hopper, or JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_ep.exchange.checks import vary_alike
from jax_ep.ffi.lowering import like, make_primitive
from jax_ep.formats.scales import BLOCK_ROWS, first_blocks, group_of
from jax_ep.layer.matmul.calls import call_kernel
from jax_ep.layer.matmul.choose import Implementation, Operation, Work, choose
from jax_ep.layer.matmul.quantize_rows import Codes

_TARGET = "jax_ep_scaled_matmul_grad"
_ACCUMULATOR = 5  # the operand


def multiply_columns(
    dtype: Any, lhs: Codes, rhs: Codes, row_offsets: jax.Array, accumulator: jax.Array | None = None
) -> jax.Array:
    """`[L, k, n]`: for each group, the products of columns, summed over its rows.

    lhs, rhs: codes along columns, `[k, 128 B]` and `[n, 128 B]`, of rows with these offsets. The
    products of a block of rows are summed by themselves; these sums, times both scales, are added
    in float32, and the total is rounded once; zero for groups without rows. An `accumulator`, of
    float32, is what the total is added to, in one addition; on GPUs, in place.
    """
    others = () if accumulator is None else (accumulator,)
    operands = lhs.codes, rhs.codes, row_offsets, lhs.scales, rhs.scales, *others
    return scaled_matmul_grad_p.bind(*operands, dtype=np.dtype(dtype))[0]


def _by_blocks(
    lhs: jax.Array,
    rhs: jax.Array,
    row_offsets: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    *accumulator: jax.Array,
    dtype: np.dtype,
) -> list[jax.Array]:
    n_blocks, n_groups = lhs_scales.shape[0], row_offsets.shape[0] - 1
    row_offsets = jnp.minimum(row_offsets, jnp.uint32(lhs.shape[1]))
    starts = first_blocks(row_offsets)
    groups = group_of(starts, n_blocks)
    zeros = jnp.zeros((n_groups, lhs.shape[0], rhs.shape[0]), jnp.float32)
    operands = lhs, rhs, lhs_scales, rhs_scales, groups, starts, zeros
    lhs, rhs, lhs_scales, rhs_scales, groups, starts, zeros = vary_alike((), *operands)

    def add_block(block: jax.Array, sums: jax.Array) -> jax.Array:
        a, b = (
            lax.dynamic_slice_in_dim(x, block * BLOCK_ROWS, BLOCK_ROWS, 1).astype(jnp.float32)
            for x in (lhs, rhs)
        )
        products = lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision="highest")
        scales = lhs_scales[block][:, None] * rhs_scales[block][None]
        return sums.at[groups[block]].add(products * scales)

    sums = lax.fori_loop(0, jnp.minimum(starts[-1], n_blocks), add_block, zeros)
    if accumulator:
        has_rows = (row_offsets[1:] > row_offsets[:-1])[:, None, None]
        sums = jnp.where(has_rows, accumulator[0] + sums, accumulator[0])
    return [sums.astype(dtype)]


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, dtype: np.dtype, platform: str = "other"
) -> Any:
    types: Any = ctx.avals_in
    lhs, rhs, row_offsets, *_ = types
    sizes = lhs.shape[1], row_offsets.shape[0] - 1, lhs.shape[0], rhs.shape[0]
    work = Work(Operation.MULTIPLY_COLUMNS, *sizes, lhs.dtype, dtype, is_scaled=True)
    if choose(work, platform) != Implementation.KERNEL:
        return mlir.lower_fun(_by_blocks, multiple_results=True)(ctx, *operands, dtype=dtype)
    aliases = {_ACCUMULATOR: 0} if len(operands) > _ACCUMULATOR else None
    return call_kernel(ctx, _TARGET, *operands, n_groups=work.n_groups, aliases=aliases)


scaled_matmul_grad_p = make_primitive(_TARGET, cuda=functools.partial(_lower, platform="cuda"))
mlir.register_lowering(scaled_matmul_grad_p, _lower)


@scaled_matmul_grad_p.def_abstract_eval
def _result_types(lhs: Any, rhs: Any, row_offsets: Any, *_: Any, dtype: np.dtype) -> Any:
    return [like(lhs, (row_offsets.shape[0] - 1, lhs.shape[0], rhs.shape[0]), dtype)]
