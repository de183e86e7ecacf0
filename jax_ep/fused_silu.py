"""fused_silu: the activation between an expert's two matmuls, quantised in one pass."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _checks
from jax_ep.formats import BF16, QuantizedFormat, TokenFormat
from jax_ep.silu_primitive import Activation, activate, fused_silu_p

_LARGEST = float(jnp.finfo(jnp.float32).max)


class QuantizedRows(NamedTuple):
    """Rows in a format that quantises, as dispatch gives them.

    Attributes:
        tokens: `[C, F]` or, where the format packs elements, `[C, F / 2]` codes.
        scales: in the format's layout.
        scales_offsets: `uint32[L]` for scales in atoms, else None.
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

    Computed in float32 and rounded once, to the format; the same bits on CPUs and GPUs
    (docs/formats.md). Differentiable for formats that do not quantise. Needs no
    `jax.shard_map`.

    Args:
        x: `[C, 2 F]`, bfloat16, float16 or float32: what the first matmul gave.
        row_offsets: `uint32[L + 1]`, that of `Dispatched`: rising from 0 to C at most.
            If it does not, a CPU raises an error; on a GPU the result is unspecified.
            A GPU takes up to 4096 groups.
        token_format: of the result; None is `BF16()`.
        interleaved: whether gate and up take turns, g0 u0 g1 u1; else `x` holds all of
            gate, then all of up.
        input_scales: `float32[L]`, one per group, for `NVFP4` (None is 1 there).
        clamp: `(alpha, limit)` gives `(up' + 1) * gate' * sigmoid(alpha * gate')` with
            `gate' = min(gate, limit)` and up' within +-limit instead.

    Returns:
        `[C, F]` in the format's dtype, or `QuantizedRows` for formats that quantise.
        Rows from `row_offsets[-1]` on are unspecified.

    Raises:
        ValueError: a shape or dtype does not fit; F is not a multiple of the format's
            block; `clamp` is not finite, or its limit negative. While tracing.
        NotImplementedError: a derivative is asked for, in a format that quantises.
    """
    token_format = BF16() if token_format is None else token_format
    _check_static(token_format, interleaved)
    x, row_offsets = jnp.asarray(x), jnp.asarray(row_offsets)
    _check(x, row_offsets)
    token_format.check_hidden_size(x.shape[1] // 2)
    n_groups = row_offsets.shape[0] - 1
    input_scales = _checks.check_input_scales(token_format, input_scales, n_groups)
    activation = Activation(token_format, interleaved, _check_clamp(clamp))
    x, row_offsets, input_scales = _checks.vary_alike(
        None, x, row_offsets, input_scales
    )
    if not isinstance(token_format, QuantizedFormat):
        return _plain(activation, x, row_offsets)
    optional = [] if input_scales is None else [input_scales]
    # The offsets, too: a dispatch that is differentiated gives them a tangent.
    fixed = map(lax.stop_gradient, (row_offsets, *optional))
    tokens, scales = _quantised(activation, x, *fixed)
    return QuantizedRows(tokens, scales, token_format.layout.offsets(row_offsets))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain(activation: Activation, x: jax.Array, row_offsets: jax.Array) -> jax.Array:
    return fused_silu_p.bind(x, row_offsets, activation=activation)[0]


def _plain_forward(
    activation: Activation, x: jax.Array, row_offsets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _plain(activation, x, row_offsets), (x, row_offsets)


def _plain_backward(
    activation: Activation, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    x, row_offsets = saved
    row = jnp.arange(x.shape[0], dtype=jnp.uint32)[:, None]
    in_use = row < row_offsets[-1]
    # Both masked: what is not in use may be NaN, and NaN * 0 is NaN.
    x = jnp.where(in_use, x, jnp.zeros((), x.dtype))
    cotangent = jnp.where(in_use, cotangent, jnp.zeros((), cotangent.dtype))
    _, pull = jax.vjp(lambda x: activate(x, activation), x)
    return *pull(cotangent.astype(jnp.float32)), None


_plain.defvjp(_plain_forward, _plain_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _quantised(activation: Activation, *operands: jax.Array) -> list[jax.Array]:
    return fused_silu_p.bind(*operands, activation=activation)


@_quantised.defjvp
def _no_derivative(activation: Activation, *_: Any) -> Any:
    raise NotImplementedError(
        f"fused_silu: {activation.token_format.name} quantises, and has no derivative. "
        "Take BF16(), or give it jax.lax.stop_gradient(x)."
    )


def _check_clamp(clamp: Any) -> tuple[float, float] | None:
    if clamp is None:
        return None
    try:
        alpha, limit = map(float, clamp)
    except (TypeError, ValueError):
        alpha = limit = math.nan
    if not (abs(alpha) <= _LARGEST and 0 <= limit <= _LARGEST):
        raise ValueError(
            "fused_silu: clamp must be (alpha, limit), two float32 numbers, the limit "
            f"not negative; got {clamp!r}."
        )
    return alpha, abs(limit)


def _check_static(token_format: Any, interleaved: Any) -> None:
    if not isinstance(token_format, TokenFormat):
        raise ValueError(
            "fused_silu: token_format must be a token format such as jax_ep.BF16(); "
            f"got {token_format!r}."
        )
    if not isinstance(interleaved, bool):
        raise ValueError(
            f"fused_silu: interleaved must be True or False; got {interleaved!r}."
        )


def _check(x: Any, row_offsets: Any) -> None:
    floats = (jnp.bfloat16, jnp.float16, jnp.float32)
    _checks.check_array("fused_silu", "x", x, (None, None), "C 2F", *floats)
    if x.shape[1] % 2:
        raise ValueError(
            "fused_silu: x must have as many columns of gate as of up; got "
            f"{x.shape[1]} columns."
        )
    _checks.check_array(
        "fused_silu", "row_offsets", row_offsets, (None,), "L+1", jnp.uint32
    )
    if not row_offsets.shape[0]:
        raise ValueError(
            "fused_silu: row_offsets must have an entry more than there are groups; "
            "got none."
        )
