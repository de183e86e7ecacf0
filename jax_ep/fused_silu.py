"""fused_silu: the activation between an expert's two matmuls, quantised in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import _checks
from jax_ep.formats import BF16, QuantizedFormat, TokenFormat
from jax_ep.formats.scales import group_of


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

    Computed in float32 and rounded once, to the format. Differentiable for formats that
    do not quantise; others have no gradient. Needs no `jax.shard_map`.

    Args:
        x: `[C, 2 F]`, bfloat16, float16 or float32: what the first matmul gave.
        row_offsets: `uint32[L + 1]`, that of `Dispatched`.
        token_format: of the result; None is `BF16()`.
        interleaved: whether gate and up take turns, g0 u0 g1 u1; else `x` holds all of
            gate, then all of up.
        input_scales: `float32[L]`, one per group, for `NVFP4` (None is 1 there).
        clamp: `(alpha, limit)` gives `(up' + 1) * gate' * sigmoid(alpha * gate')` with
            `gate' = min(gate, limit)` and up' within +-limit instead.

    Returns:
        `[C, F]` in the format's dtype, zero in rows that are not in use; or
        `QuantizedRows` for formats that quantise.

    Raises:
        ValueError: a shape or dtype does not fit; F is not a multiple of the format's
            block. While tracing.
    """
    token_format = token_format or BF16()
    x, row_offsets = jnp.asarray(x), jnp.asarray(row_offsets)
    _check(x, row_offsets)
    n_groups = row_offsets.shape[0] - 1
    input_scales = _checks.check_input_scales(token_format, input_scales, n_groups)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    in_use = row < row_offsets[-1].astype(jnp.int32)
    # Masked before: an unused NaN would reach gradients as NaN * 0.
    x = jnp.where(in_use[:, None], x, jnp.zeros((), x.dtype)).astype(jnp.float32)
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else jnp.split(x, 2, axis=1)
    result = _activate(gate, up, clamp)
    if not isinstance(token_format, QuantizedFormat):
        return result.astype(token_format.row_dtype)
    if input_scales is not None:
        input_scales = input_scales[group_of(row_offsets.astype(jnp.int32), row)]
    codes, scales = token_format.quantize(result, input_scales)
    layout = token_format.layout
    return QuantizedRows(
        codes, layout.place(scales, row_offsets), layout.offsets(row_offsets)
    )


def _activate(
    gate: jax.Array, up: jax.Array, clamp: tuple[float, float] | None
) -> jax.Array:
    if clamp is None:
        return jax.nn.silu(gate) * up
    alpha, limit = clamp
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


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
