"""dequantize: rows as numbers again, and the way of their gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import _checks
from jax_ep.formats import QuantizedFormat
from jax_ep.group import EPGroup
from jax_ep.ops import pull_back
from jax_ep.results import Dispatched


def dequantize(
    dispatched: Dispatched, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """The rows as numbers, whatever the token format.

    The gradient goes straight through: that of a row is taken for that of the token as
    it was before it was rounded, and reaches `tokens` of the dispatch by one combine.

    Args:
        dispatched: what dispatch gave.
        dtype: of the result; None is that of the tokens given to dispatch. Computed in
            float32 and rounded once.

    Returns:
        `[C, H]`; zero in rows that are not in use and in padding rows.

    Raises:
        TypeError: `dispatched` is not what dispatch gave. While tracing.
        ValueError: the call stands outside `jax.shard_map`. While tracing.
    """
    _checks.check_is_dispatched("dequantize", dispatched)
    group = dispatched.group
    _checks.check_place("dequantize", group)
    if not isinstance(group.config.token_format, QuantizedFormat):
        row = jnp.arange(group.max_recv_tokens, dtype=jnp.uint32)
        in_use = (row < dispatched.row_offsets[-1])[:, None]
        rows = dispatched.tokens.astype(dtype or dispatched.tokens.dtype)
        return jnp.where(in_use, rows, jnp.zeros((), rows.dtype))
    source_tokens = dispatched.source_tokens
    assert source_tokens is not None  # dispatch sets it for formats that quantise
    dtype = jnp.dtype(dtype or source_tokens.dtype)
    # What no gradient flows into, apart from what it does.
    codes = dataclasses.replace(dispatched, source_tokens=None, row_weights=None)
    return _dequantize(_Static(group, dtype), source_tokens, codes)


class _Static(NamedTuple):
    group: EPGroup
    dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dequantize(
    static: _Static, source_tokens: jax.Array, codes: Dispatched
) -> jax.Array:
    token_format = static.group.config.token_format
    assert isinstance(token_format, QuantizedFormat)
    assert codes.scales is not None
    return token_format.dequantize_rows(
        codes.tokens, codes.scales, codes.row_offsets, codes.input_scale, static.dtype
    )


def _dequantize_fwd(
    static: _Static, source_tokens: jax.Array, codes: Dispatched
) -> tuple[jax.Array, Any]:
    # Of the tokens only the dtypes are kept.
    kept = dataclasses.replace(codes, tokens=codes.tokens[:0], scales=None)
    return _dequantize(static, source_tokens, codes), (kept, source_tokens[:0])


def _dequantize_bwd(
    static: _Static, saved: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    routing, like = saved
    grad_tokens = pull_back(static.group, cotangent, routing)
    return grad_tokens.astype(like.dtype), None


_dequantize.defvjp(_dequantize_fwd, _dequantize_bwd)
