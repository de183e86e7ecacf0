"""The matmuls of experts and the activation between them, which is no call of its own on Hopper.

The bits are those of three calls. One call is the first matmul and the activation, and also stores
the former's result for a gradient. A gradient differentiates the activation in the call that gives
the gradient of the second matmul's rows.
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
from jax_ep.layer.gated_gradient import multiply_activated
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
    hidden, down, row_offsets = checks.vary_alike((), *operands)
    fixed = lax.stop_gradient(hidden)  # known_values differentiates
    (values,) = fused_silu_p.bind(fixed, row_offsets, activation=activation)
    return multiply_activated(activation, hidden, values, down, row_offsets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_mlp(activation: Activation, *operands: jax.Array) -> jax.Array:
    rows, gate_up, down, row_offsets = operands
    operands = rows, gate_up, row_offsets
    (values,) = gated_matmul_p.bind(*operands, activation=activation, keeps_hidden=False)
    return multiply_groups(_MATMUL, values, down, row_offsets)


def _fwd(
    activation: Activation,
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    row_offsets: jax.Array,
) -> tuple[jax.Array, Any]:
    def product(rows: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        hidden, values = _multiply_and_activate(activation, rows, gate_up, row_offsets)
        hidden = checkpoint_name(hidden, EXPERT_HIDDEN_NAME)
        return multiply_activated(activation, hidden, values, down, row_offsets)

    return jax.vjp(product, rows, gate_up, down)


_gated_mlp.defvjp(_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_and_activate(
    activation: Activation, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first matmul's result and its activation, which passes no gradient on.

    `multiply_activated` differentiates the activation by the former.
    """
    values, hidden = gated_matmul_p.bind(*operands, activation=activation, keeps_hidden=True)
    return hidden, values


def _multiply_and_activate_fwd(activation: Activation, *operands: jax.Array) -> tuple[Any, Any]:
    def multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_matmul(_MATMUL, rows, weights, operands[2])

    return _multiply_and_activate(activation, *operands), jax.vjp(multiply, *operands[:2])[1]


_multiply_and_activate.defvjp(
    _multiply_and_activate_fwd, lambda activation, pull, cotangents: (*pull(cotangents[0]), None)
)


def _by_two_calls(
    rows: jax.Array,
    weights: jax.Array,
    row_offsets: jax.Array,
    *,
    activation: Activation,
    keeps_hidden: bool,
) -> list[jax.Array]:
    hidden = multiply_groups(_MATMUL, rows, weights, row_offsets)
    values = fused_silu_p.bind(hidden, row_offsets, activation=activation)
    return [*values, hidden] if keeps_hidden else values


def _lower_cuda(
    ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation, keeps_hidden: bool
) -> Any:
    values: Any = ctx.avals_out[0]
    n_rows, row_size = values.shape
    hidden = like(values, (n_rows, 2 * row_size), values.dtype)
    if row_size % 8 or not (is_hopper() and has_kernel(ctx.avals_in, hidden, _MATMUL)):
        return _lower_as_two(ctx, *operands, activation=activation, keeps_hidden=keeps_hidden)
    call = custom_call(_TARGET)
    results = call(
        ctx.replace(avals_out=[values, hidden, workspace(*ctx.avals_in)]),
        *operands,
        keeps_hidden=np.bool_(keeps_hidden),
        **gate_attributes(activation),
    )
    return fusion_barrier(results[: len(ctx.avals_out)])


_lower_as_two = mlir.lower_fun(_by_two_calls, multiple_results=True)
gated_matmul_p = make_primitive(_TARGET, cuda=_lower_cuda)
mlir.register_lowering(gated_matmul_p, _lower_as_two)


@gated_matmul_p.def_abstract_eval
def _result_types(
    rows: Any, weights: Any, row_offsets: Any, *, activation: Activation, keeps_hidden: bool
) -> Any:
    n_rows, n_columns = rows.shape[0], weights.shape[2]
    values = like(rows, (n_rows, n_columns // 2), activation.token_format.row_dtype)
    return [values, like(rows, (n_rows, n_columns), _MATMUL.dtype)] if keeps_hidden else [values]
