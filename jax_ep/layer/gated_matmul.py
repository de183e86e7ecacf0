"""The first matmul of experts and the activation of its result, in one call on Hopper GPUs.

The bits are those of the two calls. A function that is differentiated makes two, since its gradient
needs the result of the first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import mlir

from jax_ep.layer.activation import Activation, fused_silu_p
from jax_ep.layer.fused_silu import activate
from jax_ep.layer.grouped_matmul import multiply_arrays
from jax_ep.layer.matmul import (
    Matmul,
    MatmulForm,
    has_kernel,
    is_hopper,
    multiply_groups,
    workspace,
)
from jax_ep.operands import checks
from jax_ep.xla_ffi.lowering import custom_call, fusion_barrier, like, make_primitive

# Name of the result of the first matmul, `[C, 2 F]`, with its bias, for `jax.checkpoint` policies.
EXPERT_HIDDEN_NAME = "jax_ep_expert_hidden"

_TARGET = "jax_ep_gated_matmul"
_MATMUL = Matmul(MatmulForm.WEIGHTS, np.dtype(jnp.bfloat16))


def may_be_one_call(rows: jax.Array, weights: jax.Array, transposed: bool) -> bool:
    """Whether `multiply_and_activate` takes these arrays, `[C, H]` and `[L, H, 2 F]`."""
    is_empty = 0 in (*rows.shape, *weights.shape)
    return rows.dtype == jnp.bfloat16 and not transposed and not is_empty


def multiply_and_activate(
    rows: jax.Array, weights: jax.Array, row_offsets: jax.Array, activation: Activation
) -> jax.Array:
    """`bfloat16[C, F]`: the activation of each row times the weights of its group."""
    operands = rows, weights, lax.stop_gradient(row_offsets)
    return _gated_matmul(activation, *checks.vary_alike((), *operands))


def activate_product(
    activation: Activation, rows: jax.Array, weights: jax.Array, row_offsets: jax.Array
) -> jax.Array:
    """The same by two calls, with the name of the first one's result."""
    hidden = multiply_arrays(rows, weights, row_offsets, transposed=False)
    return activate(checkpoint_name(hidden, EXPERT_HIDDEN_NAME), row_offsets, activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_matmul(activation: Activation, *operands: jax.Array) -> jax.Array:
    return gated_matmul_p.bind(*operands, activation=activation)[0]


def _fwd(
    activation: Activation, rows: jax.Array, weights: jax.Array, row_offsets: jax.Array
) -> tuple[jax.Array, Any]:
    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return activate_product(activation, rows, weights, row_offsets)

    return jax.vjp(product, rows, weights)


_gated_matmul.defvjp(_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


def _by_two_calls(
    rows: jax.Array, weights: jax.Array, row_offsets: jax.Array, *, activation: Activation
) -> list[jax.Array]:
    hidden = multiply_groups(_MATMUL, rows, weights, row_offsets)
    return fused_silu_p.bind(hidden, row_offsets, activation=activation)


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation) -> Any:
    values: Any = ctx.avals_out[0]
    n_rows, row_size = values.shape
    hidden = like(values, (n_rows, 2 * row_size), values.dtype)
    if row_size % 8 or not (is_hopper() and has_kernel(ctx.avals_in, hidden, _MATMUL)):
        return _lower_as_two(ctx, *operands, activation=activation)
    alpha, limit = activation.clamp or (0.0, 0.0)
    call = custom_call(_TARGET)
    values, *_ = call(
        ctx.replace(avals_out=[values, hidden, workspace(*ctx.avals_in)]),
        *operands,
        interleaved=np.bool_(activation.interleaved),
        clamped=np.bool_(activation.clamp is not None),
        alpha=np.float32(alpha),
        limit=np.float32(limit),
    )
    return fusion_barrier([values])


_lower_as_two = mlir.lower_fun(_by_two_calls, multiple_results=True)
gated_matmul_p = make_primitive(_TARGET, cuda=_lower_cuda)
mlir.register_lowering(gated_matmul_p, _lower_as_two)


@gated_matmul_p.def_abstract_eval
def _result_types(rows: Any, weights: Any, row_offsets: Any, *, activation: Activation) -> Any:
    return [like(rows, (rows.shape[0], weights.shape[2] // 2), activation.token_format.row_dtype)]
