"""expert_mlp: the gated feed-forward network of every expert, applied to its rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange import checks
from jax_ep.formats import BF16, BlockwiseFP8, Plain, QuantizedFormat
from jax_ep.group import check_group
from jax_ep.layer.activation.api import QuantizedRows, activate, check_activation
from jax_ep.layer.activation.calls import Activation
from jax_ep.layer.dequantize import to_numbers
from jax_ep.layer.expert_weights import ExpertWeights, call_name, check_arrays, check_codes
from jax_ep.layer.fetch_experts import fetch_experts, fetch_gradients, lend_experts
from jax_ep.layer.matmul.api import multiply_arrays, transposed_scales
from jax_ep.layer.matmul.calls import flatten_weights
from jax_ep.layer.matmul.choose import is_gated
from jax_ep.layer.matmul.gated import EXPERT_HIDDEN_NAME, gated_mlp
from jax_ep.layer.matmul.gated_scaled import scaled_mlp
from jax_ep.layer.matmul.rules import add_bias
from jax_ep.layer.quantize_weights import QuantizedWeights
from jax_ep.results import Dispatched, check_dispatched

# Of the weights that are sent: transposed codes, and a source that no gradient in FP8 reads.
_NOT_SENT: dict[str, Any] = dict(gradient_codes=None, source=None)


def expert_mlp(
    dispatched: Dispatched,
    gate_up: jax.Array | QuantizedWeights,
    down: jax.Array | QuantizedWeights,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """`(silu(x @ gate) * (x @ up)) @ down` of every row x, with its expert's weights.

    Two grouped matmuls and `fused_silu`; a bias is added to the result of its matmul.
    Differentiable. On Hopper GPUs, one kernel can compute the first matmul and the activation, so
    that the result of the former takes no memory unless a gradient needs it. With
    `QuantizedWeights`, both matmuls are in FP8, and gradients are straight-through: for the tokens
    given to dispatch and the weights given to `quantize_weights`, computed in bfloat16 or, with its
    `fp8_gradients`, in FP8.

    For a gradient, JAX keeps the rows and the results of the first matmul and of the activation, or
    recomputes what a `jax.checkpoint` policy leaves out. The first matmul's result has the name
    `EXPERT_HIDDEN_NAME`. With `config.expert_copies`, `fetch_experts` brings the weights of copies.

    Args:
        dispatched: the result of dispatch. Rows in a format that quantizes are dequantized to the
            weights' dtype, unless both weights are `QuantizedWeights`; then the format must be
            `BlockwiseFP8`.
        gate_up: `[L + se, H, 2 F]`, all gate columns first: bfloat16, float16 or float32, in the
            rows' dtype; or `QuantizedWeights`, for which F must be a multiple of 128.
        down: `[L + se, F, H]`, likewise.
        gate_up_bias: `[L + se, 2 F]` or None, its columns ordered like those of `gate_up`; in the
            weights' dtype, bfloat16 with `QuantizedWeights`.
        down_bias: `[L + se, H]` or None, likewise.
        transposed: whether the weights are `[L + se, 2 F, H]` and `[L + se, H, F]`. Must be False
            with `QuantizedWeights`, which have their own `transposed`.
        interleaved: whether gate and up columns alternate, as in `fused_silu`.
        clamp: `(alpha, limit)`, as in `fused_silu`; `(1.702, 7.0)` in GPT-OSS.

    Returns:
        `[C, H]` for combine, in the weights' dtype, which must then be the config's
        `combine_dtype`; bfloat16 with `QuantizedWeights`. Rows that are not in use are unspecified.

    Raises:
        TypeError: `dispatched` is not the result of dispatch, or one of the weights is quantized
            and the other is not. While tracing.
        ValueError: a shape, dtype or format does not fit; or the rows are quantized, and the group
            is closed or the call is outside `jax.shard_map`. While tracing.
    """
    check_dispatched("expert_mlp", dispatched)
    call = call_name(dispatched)
    clamp = check_activation(call, interleaved, clamp)
    checks.check_flags(call, transposed=transposed)
    if isinstance(dispatched.group.config.token_format, QuantizedFormat):
        check_group("expert_mlp", dispatched.group)  # for `dequantize`
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    if isinstance(gate_up, QuantizedWeights) or isinstance(down, QuantizedWeights):
        weights = _fetch_codes(dispatched, _check_quantized(dispatched, weights, transposed))
        return _scaled_mlp(dispatched, weights, Activation(BF16(), interleaved, clamp))
    weights = ExpertWeights(*checks.as_arrays(call, **weights._asdict()))
    check_arrays(dispatched, weights, transposed)
    activation = Activation(Plain(weights.gate_up.dtype), interleaved, clamp)
    if dispatched.copies is not None:
        dispatched, weights = _with_copies(dispatched, weights)
    return _plain_mlp(dispatched, weights, transposed, activation)


def _with_copies(
    dispatched: Dispatched, weights: ExpertWeights
) -> tuple[Dispatched, ExpertWeights]:
    """The matrices in two parts, biases in one.

    All copies can travel before the first matmul: ranks that wait for others' weights would
    otherwise wait for their matmuls, too.
    """
    own, copies, row_offsets = lend_experts(dispatched, weights)
    dispatched = dataclasses.replace(dispatched, row_offsets=row_offsets)
    gate_up_bias, down_bias = (
        None if bias is None else jnp.concatenate([bias, of_copies])
        for bias, of_copies in zip(own[2:], copies[2:], strict=True)
    )
    matrices = (own.gate_up, copies.gate_up), (own.down, copies.down)
    return dispatched, ExpertWeights(*matrices, gate_up_bias, down_bias)


def _plain_mlp(
    dispatched: Dispatched, weights: ExpertWeights, transposed: bool, activation: Activation
) -> jax.Array:
    gate_up, down, bias, _ = weights
    first, _ = flatten_weights(gate_up)
    rows, row_offsets = dispatched.tokens, dispatched.row_offsets
    if isinstance(dispatched.group.config.token_format, QuantizedFormat):
        rows = to_numbers(dispatched, first.dtype)
    if is_gated(rows, first, transposed):
        results = gated_mlp(activation, rows, gate_up, down, row_offsets, bias)
        return _add_bias(results, weights.down_bias, row_offsets)
    hidden = multiply_arrays(rows, gate_up, row_offsets, transposed)
    hidden = _add_bias(hidden, bias, row_offsets)
    hidden = checkpoint_name(hidden, EXPERT_HIDDEN_NAME)
    values = activate(hidden, row_offsets, activation)
    results = multiply_arrays(values, down, row_offsets, transposed)
    return _add_bias(results, weights.down_bias, row_offsets)


def _check_quantized(
    dispatched: Dispatched, weights: ExpertWeights, transposed: bool
) -> ExpertWeights:
    gate_up, down, *biases = weights
    call = call_name(dispatched)
    token_format = dispatched.group.config.token_format
    if not (isinstance(gate_up, QuantizedWeights) and isinstance(down, QuantizedWeights)):
        raise TypeError(
            f"{call}: gate_up and down must both be arrays or both be QuantizedWeights; got "
            f"{type(gate_up).__name__} and {type(down).__name__}."
        )
    if transposed:
        raise ValueError(
            f"{call}: transposed must be False with QuantizedWeights; pass it to quantize_weights."
        )
    if not isinstance(token_format, BlockwiseFP8):
        raise ValueError(
            f"{call}: with QuantizedWeights, the rows must be in BlockwiseFP8; the group's "
            f"token_format is {token_format!r}."
        )
    named = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
    weights = ExpertWeights(gate_up, down, *checks.as_arrays(call, **named))
    check_codes(dispatched, weights)
    return weights


def _fetch_codes(dispatched: Dispatched, weights: ExpertWeights) -> ExpertWeights:
    """`fetch_experts`; with gradients in FP8, codes travel, and of sources the gradients alone."""
    if dispatched.copies is None:
        return weights
    matrices = weights.gate_up, weights.down
    sent = [
        each if each.gradient_codes is None else dataclasses.replace(each, **_NOT_SENT)
        for each in matrices
    ]
    fetched = fetch_experts(dispatched, weights._replace(gate_up=sent[0], down=sent[1]))

    def complete(own: QuantizedWeights, fetched: QuantizedWeights) -> QuantizedWeights:
        if own.gradient_codes is None:
            return fetched
        of_copies = fetched.codes[own.codes.shape[0] :].swapaxes(1, 2)
        parts = checks.vary_alike((), own.gradient_codes, of_copies)
        source = None if own.source is None else fetch_gradients(dispatched, own.source)
        return dataclasses.replace(fetched, gradient_codes=jnp.concatenate(parts), source=source)

    gate_up, down = map(complete, matrices, (fetched.gate_up, fetched.down))
    return fetched._replace(gate_up=gate_up, down=down)


def _scaled_mlp(
    dispatched: Dispatched, weights: ExpertWeights, activation: Activation
) -> jax.Array:
    token_format: Any = dispatched.group.config.token_format
    row_offsets, scales = dispatched.row_offsets, dispatched.scales
    assert scales is not None
    rows = QuantizedRows(dispatched.tokens, scales, dispatched.scales_offsets)
    rows = transposed_scales(rows, token_format)
    tokens = to_numbers(dispatched, jnp.bfloat16)  # for the gradient only, otherwise XLA drops it
    results = scaled_mlp(activation, rows, tokens, weights, row_offsets)
    return _add_bias(results, weights.down_bias, row_offsets)


def _add_bias(rows: jax.Array, bias: jax.Array | None, row_offsets: jax.Array) -> jax.Array:
    if bias is None:
        return rows
    row_offsets = lax.stop_gradient(row_offsets)  # those of a dispatch have a tangent
    return add_bias(*checks.vary_alike((), rows, bias, row_offsets))
