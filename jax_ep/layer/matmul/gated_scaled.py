"""The matmuls of experts in FP8: two calls on Hopper GPUs, if nothing is differentiated.

The bits are those of separate calls. The first call is the first matmul, the addition of a bias,
the activation and its quantization, so that the hidden rows do not exist.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange import checks
from jax_ep.ffi.lowering import like
from jax_ep.formats import BlockwiseFP8
from jax_ep.layer.activation.api import QuantizedRows, activate, activate_and_quantize
from jax_ep.layer.activation.calls import Activation, gate_attributes
from jax_ep.layer.expert_weights import ExpertWeights
from jax_ep.layer.matmul.api import multiply_scaled
from jax_ep.layer.matmul.calls import Matmul, MatmulForm, gated_primitive, multiply_groups, work_of
from jax_ep.layer.matmul.choose import Operation, Work
from jax_ep.layer.matmul.gated import EXPERT_HIDDEN_NAME, add_and_activate, present
from jax_ep.layer.matmul.rules import add_bias
from jax_ep.layer.quantize_weights import QuantizedWeights

_MATMUL = Matmul(MatmulForm.TRANSPOSED_WEIGHTS, np.dtype(jnp.bfloat16))


class _Sources(NamedTuple):
    """What receives gradients; None: there is none."""

    tokens: jax.Array  # which the codes of rows encode
    gate_up: jax.Array | None  # the source of the weights
    down: jax.Array | None
    bias: jax.Array | None


class _Codes(NamedTuple):
    """What has no gradient; the weights are without sources."""

    rows: QuantizedRows
    gate_up: QuantizedWeights
    down: QuantizedWeights
    row_offsets: jax.Array


def scaled_mlp(
    activation: Activation,
    rows: QuantizedRows,
    tokens: jax.Array,
    weights: ExpertWeights,
    row_offsets: jax.Array,
) -> jax.Array:
    """`bfloat16[C, H]`: both matmuls of each row by the weights of its group, which fit.

    `rows`: with transposed scales. `tokens`: the numbers that they encode, for gradients only. The
    second matmul's bias is not added.
    """
    gate_up, down, bias, _ = weights
    sources = _Sources(tokens, gate_up.source, down.source, bias)
    gate_up, down = (dataclasses.replace(x, source=None) for x in (gate_up, down))
    codes = lax.stop_gradient(_Codes(rows, gate_up, down, row_offsets))
    operands = checks.vary_alike((), sources, codes)
    is_empty = 0 in (*rows.tokens.shape, *gate_up.codes.shape)
    return (_by_separate_calls if is_empty else _scaled_mlp)(activation, *operands)


def _by_separate_calls(activation: Activation, sources: _Sources, codes: _Codes) -> jax.Array:
    row_offsets = codes.row_offsets
    gate_up = dataclasses.replace(codes.gate_up, source=sources.gate_up)
    down = dataclasses.replace(codes.down, source=sources.down)
    hidden = multiply_scaled(codes.rows, gate_up, row_offsets, sources.tokens)
    for bias in present(sources.bias):
        hidden = add_bias(hidden, bias, row_offsets)
    hidden = checkpoint_name(hidden, EXPERT_HIDDEN_NAME)
    values = activate(hidden, row_offsets, activation)  # for the gradient only
    quantizes = _quantizing(activation)
    quantized = activate_and_quantize(lax.stop_gradient(hidden), row_offsets, quantizes)
    return multiply_scaled(quantized, down, row_offsets, values)


def _quantizing(activation: Activation) -> Activation:
    return dataclasses.replace(activation, token_format=BlockwiseFP8())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_mlp(activation: Activation, sources: _Sources, codes: _Codes) -> jax.Array:
    rows, gate_up, down, row_offsets = codes
    matmul = rows.tokens, gate_up.codes, row_offsets, rows.scales, gate_up.scales
    tokens, scales = gated_scaled_matmul_p.bind(
        *matmul, *present(sources.bias), activation=_quantizing(activation)
    )
    return multiply_scaled(QuantizedRows(tokens, scales, None), down, row_offsets)


def _fwd(activation: Activation, sources: _Sources, codes: _Codes) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda sources: _by_separate_calls(activation, sources, codes), sources)


_scaled_mlp.defvjp(_fwd, lambda activation, pull, cotangent: (*pull(cotangent), None))


def _by_three_calls(
    rows: jax.Array,
    weights: jax.Array,
    row_offsets: jax.Array,
    row_scales: jax.Array,
    weight_scales: jax.Array,
    *biases: jax.Array,
    activation: Activation,
) -> list[jax.Array]:
    product = multiply_groups(_MATMUL, rows, weights, row_offsets, row_scales, weight_scales)
    return add_and_activate(activation, product, row_offsets, *biases)[1]


def _describe(operands: Sequence[Any], **_: Any) -> Work:
    options = dict(is_scaled=True, has_bias=len(operands) > 5)
    return work_of(_MATMUL, operands, Operation.ACTIVATE, **options)


gated_scaled_matmul_p = gated_primitive(
    "jax_ep_gated_scaled_matmul", _describe, gate_attributes, _by_three_calls, 2
)


@gated_scaled_matmul_p.def_abstract_eval
def _result_types(rows: Any, weights: Any, *_: Any, activation: Activation) -> Any:
    token_format = activation.token_format
    n_rows, row_size, n_groups = rows.shape[0], weights.shape[1] // 2, weights.shape[0]
    shape = token_format.layout.shape(n_rows, token_format.n_scales(row_size), n_groups)
    return [
        like(rows, (n_rows, row_size), token_format.row_dtype),
        like(rows, shape, token_format.scale_dtype),
    ]
