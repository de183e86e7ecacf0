"""dequantize: converts received rows back to floating point."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.exchange.base import straight_through
from jax_ep.exchange.rows import in_use
from jax_ep.formats import QuantizedFormat
from jax_ep.formats.plain import as_dtype
from jax_ep.group import calls_of, check_group
from jax_ep.results import Dispatched, check_dispatched


def dequantize(dispatched: Dispatched, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Converts received rows to floating point, whatever the token format.

    The gradient is straight-through: a row's gradient is taken as that of the token before
    quantization, and one combine returns it to the dispatch's `tokens`.

    Args:
        dispatched: the result of dispatch.
        dtype: of the result, computed in float32 and rounded once. None is the dtype of the tokens
            given to dispatch; bfloat16 if they were `Quantized`, which have no gradient.

    Returns:
        `[C, H]`; zero in unused rows and padding rows.

    Raises:
        TypeError: `dispatched` is not the result of dispatch. While tracing.
        ValueError: the group is closed, the call is outside `jax.shard_map`, or `dtype` is not a
            floating-point dtype. While tracing.
    """
    check_dispatched("dequantize", dispatched)
    check_group("dequantize", dispatched.group)
    _check_dtype(dispatched.group.geometry.call("dequantize"), dtype)
    return to_numbers(dispatched, dtype)


def to_numbers(dispatched: Dispatched, dtype: Any = None) -> jax.Array:
    """`dequantize` of the result of a dispatch."""
    group, row_offsets = dispatched.group, dispatched.row_offsets
    token_format = group.config.token_format
    if not isinstance(token_format, QuantizedFormat):
        rows = dispatched.tokens.astype(dtype or dispatched.tokens.dtype)
        if group.config.zero_unused_rows:
            return rows
        is_used = in_use(row_offsets, rows.shape[0])
        return jnp.where(is_used, rows, jnp.zeros((), rows.dtype))
    source_tokens, scales = dispatched.source_tokens, dispatched.scales
    assert scales is not None
    fixed = jax.lax.stop_gradient((dispatched.tokens, scales, row_offsets, dispatched.input_scale))
    if source_tokens is None:
        return token_format.dequantize_rows(*fixed, dtype or jnp.bfloat16)
    source_tokens = source_tokens.astype(dtype or source_tokens.dtype)
    rows = token_format.dequantize_rows(*fixed, source_tokens.dtype)
    return straight_through(calls_of(group), source_tokens, rows, dispatched.routing)


def _check_dtype(operation: str, given: Any) -> None:
    dtype = as_dtype(given)
    if given is None or (dtype is not None and jnp.issubdtype(dtype, jnp.floating)):
        return
    got = repr(given) if dtype is None else dtype.name
    raise ValueError(f"{operation}: dtype must be of floating-point numbers; got {got}.")
