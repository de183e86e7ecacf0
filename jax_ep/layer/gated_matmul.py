"""The matmuls of experts and the activation between them, which is no call of its own on Hopper.

The bits are those of three calls. A function that is not differentiated activates the result of the
first matmul in the same call. A gradient needs that result, and differentiates the activation in
the call that gives the gradient of the second matmul's rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import mlir

from jax_ep.layer.activation import Activation, fused_silu_p, gate_attributes
from jax_ep.layer.gated_gradient import activate_and_multiply
from jax_ep.layer.matmul import (
    Matmul,
    MatmulForm,
    has_kernel,
    is_hopper,
    multiply_groups,
    workspace,
)
from jax_ep.layer.matmul_gradients import grouped_matmul
from jax_ep.operands import checks
from jax_ep.xla_ffi.lowering import custom_call, fusion_barrier, like, make_primitive

# Name of the result of the first matmul, `[C, 2 F]`, with its bias, for `jax.checkpoint` policies.
EXPERT_HIDDEN_NAME = "jax_ep_expert_hidden"

_TARGET = "jax_ep_gated_matmul"
_MATMUL = Matmul(MatmulForm.WEIGHTS, np.dtype(jnp.bfloat16))


def may_fuse(rows: jax.Array, weights: jax.Array, transposed: bool) -> bool:
    """Whether the functions below take these arrays, `[C, H]` and `[L, H, 2 F]`."""
    is_empty = 0 in (*rows.shape, *weights.shape)
    return rows.dtype == jnp.bfloat16 and not transposed and not is_empty


def gated_mlp(
    activation: Activation,
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    row_offsets: jax.Array,
) -> jax.Array:
    """`bfloat16[C, H]`: both matmuls of each row by the weights of its group, with no biases."""
    operands = rows, gate_up, down, lax.stop_gradient(row_offsets)
    return _gated_mlp(activation, *checks.vary_alike((), *operands))


def second_half(
    activation: Activation, hidden: jax.Array, down: jax.Array, row_offsets: jax.Array
) -> jax.Array:
    """`bfloat16[C, H]`: the same of the first matmul's result, which may have a bias."""
    operands = hidden, down, lax.stop_gradient(row_offsets)
    return activate_and_multiply(activation, *checks.vary_alike((), *operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_mlp(activation: Activation, *operands: jax.Array) -> jax.Array:
    rows, gate_up, down, row_offsets = operands
    (values,) = gated_matmul_p.bind(rows, gate_up, row_offsets, activation=activation)
    return multiply_groups(_MATMUL, values, down, row_offsets)


def _fwd(
    activation: Activation,
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    row_offsets: jax.Array,
) -> tuple[jax.Array, Any]:
    def product(rows: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = grouped_matmul(_MATMUL, rows, gate_up, row_offsets)
        hidden = checkpoint_name(hidden, EXPERT_HIDDEN_NAME)
        return activate_and_multiply(activation, hidden, down, row_offsets)

    return jax.vjp(product, rows, gate_up, down)


_gated_mlp.defvjp(_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


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
    call = custom_call(_TARGET)
    values, *_ = call(
        ctx.replace(avals_out=[values, hidden, workspace(*ctx.avals_in)]),
        *operands,
        **gate_attributes(activation),
    )
    return fusion_barrier([values])


_lower_as_two = mlir.lower_fun(_by_two_calls, multiple_results=True)
gated_matmul_p = make_primitive(_TARGET, cuda=_lower_cuda)
mlir.register_lowering(gated_matmul_p, _lower_as_two)


@gated_matmul_p.def_abstract_eval
def _result_types(rows: Any, weights: Any, row_offsets: Any, *, activation: Activation) -> Any:
    return [like(rows, (rows.shape[0], weights.shape[2] // 2), activation.token_format.row_dtype)]
