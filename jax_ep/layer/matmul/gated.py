"""The matmuls of experts and the activation between them, which is no call of its own on Hopper.

The bits are those of separate calls. One call is the first matmul, the addition of a bias and the
activation, and also stores what is activated, the hidden rows, for a gradient. A gradient
differentiates the activation in the call that gives the gradient of the second matmul's rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange import checks
from jax_ep.ffi.lowering import like
from jax_ep.layer.activation.calls import Activation, fused_silu_p, gate_attributes
from jax_ep.layer.activation.rules import known_values, pull_back
from jax_ep.layer.matmul.calls import (
    Matmul,
    MatmulForm,
    Weights,
    flatten_weights,
    gated_primitive,
    has_two_parts,
    multiply_groups,
    work_of,
)
from jax_ep.layer.matmul.choose import Operation, Work
from jax_ep.layer.matmul.rules import add_bias, grouped_matmul, weights_gradient

# Name of the result of the first matmul, `[C, 2 F]`, with its bias, for `jax.checkpoint` policies.
EXPERT_HIDDEN_NAME = "jax_ep_expert_hidden"

_DTYPE = np.dtype(jnp.bfloat16)
_FORWARD = Matmul(MatmulForm.WEIGHTS, _DTYPE)
_BACKWARD = Matmul(MatmulForm.TRANSPOSED_WEIGHTS, _DTYPE)


def gated_mlp(
    activation: Activation,
    rows: jax.Array,
    gate_up: Weights,
    down: Weights,
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
    first, others = flatten_weights(gate_up)
    operands = rows, first, row_offsets, *present(bias), *others
    (values,) = gated_matmul_p.bind(*operands, activation=activation, keeps_hidden=False)
    return multiply_groups(_FORWARD, values, down, row_offsets)


def present(bias: jax.Array | None) -> tuple[jax.Array, ...]:
    """The bias as operands of a call, if there is one."""
    return () if bias is None else (bias,)


def _fwd(activation: Activation, *operands: Any) -> tuple[jax.Array, Any]:
    *arrays, row_offsets = operands

    def product(rows: Any, gate_up: Any, bias: Any, down: Any) -> jax.Array:
        hidden, values = _multiply_and_activate(activation, rows, gate_up, bias, row_offsets)
        hidden = checkpoint_name(hidden, EXPERT_HIDDEN_NAME)
        return _multiply_activated(activation, hidden, values, down, row_offsets)

    return jax.vjp(product, *arrays)


_gated_mlp.defvjp(_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_and_activate(activation: Activation, *operands: Any) -> tuple[jax.Array, jax.Array]:
    """The hidden rows and their activation, which passes no gradient on.

    `_multiply_activated` differentiates the activation by the former.
    """
    rows, weights, bias, row_offsets = operands
    first, others = flatten_weights(weights)
    operands = rows, first, row_offsets, *present(bias), *others
    values, hidden = gated_matmul_p.bind(*operands, activation=activation, keeps_hidden=True)
    return hidden, values


def _multiply_and_activate_fwd(activation: Activation, *operands: Any) -> tuple[Any, Any]:
    *arrays, row_offsets = operands

    def multiply(rows: jax.Array, weights: Weights, bias: jax.Array | None) -> jax.Array:
        product = grouped_matmul(_FORWARD, rows, weights, row_offsets)
        return product if bias is None else add_bias(product, bias, row_offsets)

    return _multiply_and_activate(activation, *operands), jax.vjp(multiply, *arrays)[1]


_multiply_and_activate.defvjp(
    _multiply_and_activate_fwd, lambda activation, pull, cotangents: (*pull(cotangents[0]), None)
)


def _by_two_calls(
    rows: jax.Array,
    weights: jax.Array,
    row_offsets: jax.Array,
    *others: jax.Array,
    activation: Activation,
    keeps_hidden: bool,
) -> list[jax.Array]:
    n_parts = has_two_parts(weights, row_offsets)
    biases, parts = others[: len(others) - n_parts], others[len(others) - n_parts :]
    all_weights = (weights, *parts) if parts else weights
    product = multiply_groups(_FORWARD, rows, all_weights, row_offsets)
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


def _describe(operands: Sequence[Any], keeps_hidden: bool, **_: Any) -> Work:
    has_bias = len(operands) - has_two_parts(operands[1], operands[2]) > 3
    options = dict(has_bias=has_bias, keeps_hidden=keeps_hidden)
    return work_of(_FORWARD, operands, Operation.ACTIVATE, **options)


def _attributes(activation: Activation, keeps_hidden: bool) -> dict[str, Any]:
    return dict(keeps_hidden=np.bool_(keeps_hidden), **gate_attributes(activation))


gated_matmul_p = gated_primitive("jax_ep_gated_matmul", _describe, _attributes, _by_two_calls, 2)


@gated_matmul_p.def_abstract_eval
def _result_types(
    rows: Any, weights: Any, *_: Any, activation: Activation, keeps_hidden: bool
) -> Any:
    n_rows, n_columns = rows.shape[0], weights.shape[2]
    values = like(rows, (n_rows, n_columns // 2), activation.token_format.row_dtype)
    return [values, like(rows, (n_rows, n_columns), _FORWARD.dtype)] if keeps_hidden else [values]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_activated(activation: Activation, *operands: Any) -> jax.Array:
    """`bfloat16[C, H]`: values `[C, F]`, the activation of hidden rows, times weights `[L, F, H]`.

    Operands: hidden rows `[C, 2 F]`, values, weights, row_offsets. The activation's gradient goes
    to the hidden rows, none to the values.
    """
    return _multiply_activated_fwd(activation, *operands)[0]


def _multiply_activated_fwd(
    activation: Activation,
    hidden: jax.Array,
    values: jax.Array,
    weights: Weights,
    row_offsets: jax.Array,
) -> tuple[jax.Array, Any]:
    values = known_values(activation, hidden, values, row_offsets)
    results = grouped_matmul(_FORWARD, values, weights, row_offsets)
    return results, (hidden, values, weights, row_offsets)


def _multiply_activated_bwd(activation: Activation, saved: Any, cotangent: jax.Array) -> Any:
    hidden, values, weights, row_offsets = saved
    of_hidden = _pull_back(activation, cotangent, weights, hidden, row_offsets)
    of_weights = weights_gradient(_FORWARD.form, values, weights, row_offsets, cotangent)
    return of_hidden, None, of_weights, None


_multiply_activated.defvjp(_multiply_activated_fwd, _multiply_activated_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pull_back(activation: Activation, *operands: Any) -> jax.Array:
    """The gradient of hidden rows; unspecified in rows that are not in use."""
    cotangent, weights, hidden, row_offsets = operands
    first, others = flatten_weights(weights)
    operands = cotangent, first, hidden, row_offsets, *others
    return gated_matmul_grad_p.bind(*operands, activation=activation)[0]


def _pull_back_fwd(activation: Activation, *operands: Any) -> tuple[jax.Array, Any]:
    *arrays, row_offsets = operands

    def by_two_calls(cotangent: jax.Array, weights: Weights, hidden: jax.Array) -> jax.Array:
        first, others = flatten_weights(weights)
        operands = cotangent, first, hidden, row_offsets, *others
        return _differentiate_by_two(*operands, activation=activation)[0]

    return jax.vjp(by_two_calls, *arrays)


_pull_back.defvjp(_pull_back_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


def _differentiate_by_two(
    cotangent: jax.Array,
    weights: jax.Array,
    hidden: jax.Array,
    row_offsets: jax.Array,
    *others: jax.Array,
    activation: Activation,
) -> list[jax.Array]:
    of_values = grouped_matmul(
        _BACKWARD, cotangent, (weights, *others) if others else weights, row_offsets
    )
    return [pull_back(activation, hidden, row_offsets, of_values)]


def _describe_gradient(operands: Sequence[Any], **_: Any) -> Work:
    cotangent, weights, _hidden, row_offsets = operands[:4]
    return work_of(_BACKWARD, (cotangent, weights, row_offsets), Operation.DIFFERENTIATE)


gated_matmul_grad_p = gated_primitive(
    "jax_ep_gated_matmul_grad", _describe_gradient, gate_attributes, _differentiate_by_two, 3
)


@gated_matmul_grad_p.def_abstract_eval
def _gradient_types(
    cotangent: Any, weights: Any, hidden: Any, *_: Any, activation: Activation
) -> Any:
    return [like(hidden, hidden.shape, hidden.dtype)]
