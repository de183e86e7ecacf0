"""The second matmul of experts, whose gradient is one call with the activation's on Hopper GPUs.

The bits are those of the two calls: the matmul's gradient of its rows, then the activation's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.layer.activation import Activation, gate_attributes
from jax_ep.layer.known_values import known_values
from jax_ep.layer.matmul import (
    Matmul,
    MatmulForm,
    has_kernel,
    is_hopper,
    multiply_groups,
    workspace,
)
from jax_ep.layer.matmul_gradients import grouped_matmul
from jax_ep.layer.silu_gradient import fused_silu_grad_p, pull_back

_TARGET = "jax_ep_gated_matmul_grad"
_DTYPE = np.dtype(jnp.bfloat16)
_FORWARD = Matmul(MatmulForm.WEIGHTS, _DTYPE)
_BACKWARD = Matmul(MatmulForm.TRANSPOSED_WEIGHTS, _DTYPE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_activated(activation: Activation, *operands: jax.Array) -> jax.Array:
    """`bfloat16[C, H]`: values `[C, F]`, the activation of hidden rows, times weights `[L, F, H]`.

    Operands: hidden rows `[C, 2 F]`, values, weights, row_offsets. The activation's gradient goes
    to the hidden rows, none to the values.
    """
    return _fwd(activation, *operands)[0]


def _fwd(
    activation: Activation,
    hidden: jax.Array,
    values: jax.Array,
    weights: jax.Array,
    row_offsets: jax.Array,
) -> tuple[jax.Array, Any]:
    values = known_values(activation, hidden, values, row_offsets)
    results = grouped_matmul(_FORWARD, values, weights, row_offsets)
    return results, (hidden, values, weights, row_offsets)


def _bwd(activation: Activation, saved: Any, cotangent: jax.Array) -> Any:
    hidden, values, weights, row_offsets = saved
    of_hidden = _pull_back(activation, cotangent, weights, hidden, row_offsets)
    of_weights = grouped_matmul(Matmul(MatmulForm.ROWS, _DTYPE), values, cotangent, row_offsets)
    return of_hidden, None, of_weights, None


multiply_activated.defvjp(_fwd, _bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pull_back(activation: Activation, *operands: jax.Array) -> jax.Array:
    """The gradient of hidden rows; unspecified in rows that are not in use."""
    return gated_matmul_grad_p.bind(*operands, activation=activation)[0]


def _pull_back_fwd(
    activation: Activation,
    cotangent: jax.Array,
    weights: jax.Array,
    hidden: jax.Array,
    row_offsets: jax.Array,
) -> tuple[jax.Array, Any]:
    def by_two_calls(cotangent: jax.Array, weights: jax.Array, hidden: jax.Array) -> jax.Array:
        of_values = grouped_matmul(_BACKWARD, cotangent, weights, row_offsets)
        return pull_back(activation, hidden, row_offsets, of_values)

    return jax.vjp(by_two_calls, cotangent, weights, hidden)


_pull_back.defvjp(_pull_back_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


def _by_two_calls(
    cotangent: jax.Array,
    weights: jax.Array,
    hidden: jax.Array,
    row_offsets: jax.Array,
    *,
    activation: Activation,
) -> list[jax.Array]:
    of_values = multiply_groups(_BACKWARD, cotangent, weights, row_offsets)
    return fused_silu_grad_p.bind(hidden, row_offsets, of_values, activation=activation)


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation) -> Any:
    types: Any = ctx.avals_in
    cotangent, weights, hidden, row_offsets = types
    of_values = like(hidden, (hidden.shape[0], weights.shape[1]), _DTYPE)
    matmul = cotangent, weights, row_offsets
    if not (is_hopper() and has_kernel(matmul, of_values, _BACKWARD)):
        return _lower_as_two(ctx, *operands, activation=activation)
    call = custom_call(_TARGET)
    of_hidden, *_ = call(
        ctx.replace(avals_out=[*ctx.avals_out, of_values, workspace(*matmul)]),
        *operands,
        **gate_attributes(activation),
    )
    return fusion_barrier([of_hidden])


_lower_as_two = mlir.lower_fun(_by_two_calls, multiple_results=True)
gated_matmul_grad_p = make_primitive(_TARGET, cuda=_lower_cuda)
mlir.register_lowering(gated_matmul_grad_p, _lower_as_two)


@gated_matmul_grad_p.def_abstract_eval
def _result_types(
    cotangent: Any, weights: Any, hidden: Any, row_offsets: Any, *, activation: Activation
) -> Any:
    return [like(hidden, hidden.shape, hidden.dtype)]
