"""The matmuls of experts and the activation between them, which is no call of its own on Hopper.

The bits are those of separate calls. One call is the first matmul, the addition of a bias and the
activation, and also stores what is activated, the hidden rows, for a gradient. A gradient
differentiates the activation in the call that gives the gradient of the second matmul's rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import mlir

from jax_ep.exchange import checks
from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.layer.activation import Activation, fused_silu_p, gate_attributes
from jax_ep.layer.gated_gradient import multiply_activated
from jax_ep.layer.matmul import (
    Matmul,
    MatmulForm,
    has_hopper_kernels,
    has_kernel,
    is_hopper,
    multiply_groups,
    workspace,
)
from jax_ep.layer.matmul_gradients import add_bias, grouped_matmul

# Name of the result of the first matmul, `[C, 2 F]`, with its bias, for `jax.checkpoint` policies.
EXPERT_HIDDEN_NAME = "jax_ep_expert_hidden"

MAX_GROUPS = 512  # that one kernel multiplies and activates: kMaxGatedGroups in C++

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
    bias: jax.Array | None = None,
) -> jax.Array:
    """`bfloat16[C, H]`: both matmuls of each row by the weights of its group.

    `bias`: `bfloat16[L, 2 F]`, which is added to the first matmul's result.
    """
    operands = rows, gate_up, bias, down, lax.stop_gradient(row_offsets)
    return _gated_mlp(activation, *checks.vary_alike((), *operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_mlp(activation: Activation, *operands: Any) -> jax.Array:
    rows, gate_up, bias, down, row_offsets = operands
    operands = rows, gate_up, row_offsets, *present(bias)
    (values,) = gated_matmul_p.bind(*operands, activation=activation, keeps_hidden=False)
    return multiply_groups(_MATMUL, values, down, row_offsets)


def present(bias: jax.Array | None) -> tuple[jax.Array, ...]:
    """The bias as operands of a call, if there is one."""
    return () if bias is None else (bias,)


def _fwd(activation: Activation, *operands: Any) -> tuple[jax.Array, Any]:
    *arrays, row_offsets = operands

    def product(rows: Any, gate_up: Any, bias: Any, down: Any) -> jax.Array:
        hidden, values = _multiply_and_activate(activation, rows, gate_up, bias, row_offsets)
        hidden = checkpoint_name(hidden, EXPERT_HIDDEN_NAME)
        return multiply_activated(activation, hidden, values, down, row_offsets)

    return jax.vjp(product, *arrays)


_gated_mlp.defvjp(_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_and_activate(activation: Activation, *operands: Any) -> tuple[jax.Array, jax.Array]:
    """The hidden rows and their activation, which passes no gradient on.

    `multiply_activated` differentiates the activation by the former.
    """
    rows, weights, bias, row_offsets = operands
    operands = rows, weights, row_offsets, *present(bias)
    values, hidden = gated_matmul_p.bind(*operands, activation=activation, keeps_hidden=True)
    return hidden, values


def _multiply_and_activate_fwd(activation: Activation, *operands: Any) -> tuple[Any, Any]:
    *arrays, row_offsets = operands

    def multiply(rows: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
        product = grouped_matmul(_MATMUL, rows, weights, row_offsets)
        return product if bias is None else add_bias(product, bias, row_offsets)

    return _multiply_and_activate(activation, *operands), jax.vjp(multiply, *arrays)[1]


_multiply_and_activate.defvjp(
    _multiply_and_activate_fwd, lambda activation, pull, cotangents: (*pull(cotangents[0]), None)
)


def _by_two_calls(
    rows: jax.Array,
    weights: jax.Array,
    row_offsets: jax.Array,
    *biases: jax.Array,
    activation: Activation,
    keeps_hidden: bool,
) -> list[jax.Array]:
    product = multiply_groups(_MATMUL, rows, weights, row_offsets)
    hidden, values = add_and_activate(activation, product, row_offsets, *biases)
    return [*values, hidden] if keeps_hidden else values


def add_and_activate(
    activation: Activation, product: jax.Array, row_offsets: jax.Array, *biases: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """The hidden rows, and the results of `fused_silu`, from the first matmul's product."""
    hidden = product
    for bias in biases:
        hidden = add_bias(hidden, bias, row_offsets)
    return hidden, fused_silu_p.bind(hidden, row_offsets, activation=activation)


def _lower_cuda(
    ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation, keeps_hidden: bool
) -> Any:
    values: Any = ctx.avals_out[0]
    n_rows, row_size = values.shape
    hidden = like(values, (n_rows, 2 * row_size), values.dtype)
    if not _has_kernel(ctx.avals_in, hidden):
        return _lower_as_two(ctx, *operands, activation=activation, keeps_hidden=keeps_hidden)
    call = custom_call(_TARGET)
    results = call(
        ctx.replace(avals_out=[values, hidden, workspace(*ctx.avals_in)]),
        *operands,
        keeps_hidden=np.bool_(keeps_hidden),
        **gate_attributes(activation),
    )
    return fusion_barrier(results[: len(ctx.avals_out)])


def _has_kernel(operands: Any, hidden: Any) -> bool:
    """Whether the custom call takes such operands."""
    n_groups, n_columns = operands[1].shape[0], hidden.shape[1]
    has_bias = len(operands) > 3  # which nothing but one kernel for Hopper adds
    if n_columns % 16 or (has_bias and not (n_groups <= MAX_GROUPS and has_hopper_kernels())):
        return False
    return is_hopper() and has_kernel(operands[:3], hidden, _MATMUL)


_lower_as_two = mlir.lower_fun(_by_two_calls, multiple_results=True)
gated_matmul_p = make_primitive(_TARGET, cuda=_lower_cuda)
mlir.register_lowering(gated_matmul_p, _lower_as_two)


@gated_matmul_p.def_abstract_eval
def _result_types(
    rows: Any, weights: Any, *_: Any, activation: Activation, keeps_hidden: bool
) -> Any:
    n_rows, n_columns = rows.shape[0], weights.shape[2]
    values = like(rows, (n_rows, n_columns // 2), activation.token_format.row_dtype)
    return [values, like(rows, (n_rows, n_columns), _MATMUL.dtype)] if keeps_hidden else [values]
