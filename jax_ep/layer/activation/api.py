"""fused_silu: the activation between an expert's two matmuls, quantized in one pass."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import checks
from jax_ep.formats import BF16, QuantizedFormat, TokenFormat
from jax_ep.formats.base import check_is_format
from jax_ep.formats.plain import FLOATS
from jax_ep.layer.activation.calls import Activation
from jax_ep.layer.activation.rules import activate_rows, quantize_activated

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


class QuantizedRows(NamedTuple):
    """Rows in a format that quantizes, as dispatch returns them.

    Attributes:
        tokens: `[C, F]` or, for packed formats, `[C, F / 2]` codes.
        scales: in the format's layout.
        scales_offsets: `uint32[G]`, of G groups, for scales in atoms, otherwise None.
    """

    tokens: jax.Array
    scales: jax.Array
    scales_offsets: jax.Array | None


def fused_silu(
    x: jax.Array,
    row_offsets: jax.Array,
    token_format: TokenFormat | None = None,
    *,
    interleaved: bool = False,
    input_scales: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array | QuantizedRows:
    """`silu(gate) * up` of the rows in use, in a token format.

    Computed in float32 and rounded once, to the format; CPUs and GPUs give the same bits
    (docs/formats.md). Differentiable for formats that do not quantize. May be called outside
    `jax.shard_map`.

    Args:
        x: `[C, 2 F]`, bfloat16, float16 or float32: the result of the first matmul.
        row_offsets: `uint32[G + 1]`, as in `Dispatched`: non-decreasing, from 0 to at most C.
            Otherwise a CPU raises an error and a GPU gives an unspecified result. A GPU takes at
            most 4096 groups.
        token_format: of the result; None is `BF16()`.
        interleaved: whether the columns alternate, g0 u0 g1 u1; by default all gate columns come
            first, then all up columns.
        input_scales: `float32[G]`, one per group, for `NVFP4` (None is 1 there).
        clamp: `(alpha, limit)` selects `(up' + 1) * gate' * sigmoid(alpha * gate')`, where `gate' =
            min(gate, limit)` and `up'` is clipped to +-limit.

    Returns:
        `[C, F]` in the format's dtype, or `QuantizedRows` for formats that quantize. Rows from
        `row_offsets[-1]` on are unspecified.

    Raises:
        ValueError: a shape or dtype does not fit; F is not a multiple of the format's block;
            `clamp` is not finite, or its limit negative. While tracing.
        NotImplementedError: for derivatives in a format that quantizes.
    """
    token_format = BF16() if token_format is None else token_format
    x, row_offsets = checks.as_arrays("fused_silu", x=x, row_offsets=row_offsets)
    _check(x, row_offsets, token_format)
    clamp = check_activation("fused_silu", interleaved, clamp)
    n_groups = row_offsets.shape[0] - 1
    input_scales = checks.check_input_scales("fused_silu", token_format, input_scales, n_groups)
    activation = Activation(token_format, interleaved, clamp)
    if not isinstance(token_format, QuantizedFormat):
        return activate(x, row_offsets, activation)
    return activate_and_quantize(x, row_offsets, activation, input_scales)


def activate(x: jax.Array, row_offsets: jax.Array, activation: Activation) -> jax.Array:
    """`fused_silu` of arrays that fit, in a format that does not quantize."""
    x, row_offsets = checks.vary_alike((), x, row_offsets)
    return activate_rows(activation, x, lax.stop_gradient(row_offsets))  # it may have a tangent


def activate_and_quantize(
    x: jax.Array,
    row_offsets: jax.Array,
    activation: Activation,
    input_scales: jax.Array | None = None,
) -> QuantizedRows:
    """`fused_silu` of arrays that fit, in a format that quantizes."""
    x, row_offsets, input_scales = checks.vary_alike((), x, row_offsets, input_scales)
    row_offsets = lax.stop_gradient(row_offsets)
    optional = [] if input_scales is None else [lax.stop_gradient(input_scales)]
    tokens, scales = quantize_activated(activation, x, row_offsets, *optional)
    layout = activation.token_format.layout
    return QuantizedRows(tokens, scales, layout.offsets(row_offsets))


def _check(x: Any, row_offsets: Any, token_format: Any) -> None:
    check_is_format(token_format, "fused_silu: ")
    checks.check_array("fused_silu", "x", x, (None, None), "C 2F", *FLOATS)
    if x.shape[1] % 2:
        raise ValueError(
            f"fused_silu: x must have as many gate columns as up columns; got {x.shape[1]} columns."
        )
    check_offsets("fused_silu", row_offsets)
    token_format.check_hidden_size(x.shape[1] // 2)


def check_offsets(operation: str, row_offsets: Any) -> None:
    """Requires `uint32[G + 1]`."""
    checks.check_array(operation, "row_offsets", row_offsets, (None,), "L+1", jnp.uint32)
    if not row_offsets.shape[0]:
        raise ValueError(
            f"{operation}: row_offsets must have one more entry than there are groups; got none."
        )


def check_activation(operation: str, interleaved: Any, clamp: Any) -> tuple[float, float] | None:
    """The clamp as numbers."""
    checks.check_flags(operation, interleaved=interleaved)
    if clamp is None:
        return None
    try:
        alpha, limit = map(float, clamp)
    except (TypeError, ValueError, OverflowError):
        alpha = limit = math.nan
    if not (abs(alpha) <= _FLOAT32_MAX and 0 <= limit <= _FLOAT32_MAX):
        raise ValueError(
            f"{operation}: clamp must be (alpha, limit), two float32 numbers, the limit not "
            f"negative; got {clamp!r}."
        )
    return alpha, abs(limit)
