"""What of a token crosses between nodes: in formats that quantize, codes and scales.

Its own rank quantizes it once, and the intra-node call takes it as its messages carry it
(ffi/core/message.h): the scales, padded to 16 bytes, then the codes, as uint32 words. Whether it
does follows from the format, the dtype and H alone, so all ranks do the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.checks import VECTOR_BYTES
from jax_ep.exchange.operands import DispatchOperands
from jax_ep.formats import QuantizedFormat, TokenFormat

_WORD_BYTES = 4


def encoded_bytes(token_format: QuantizedFormat, hidden_size: int) -> int:
    """Bytes of the codes and scales of a token, with padding."""
    return _scale_bytes(token_format, hidden_size) + token_format.payload_bytes(hidden_size)


def crosses_encoded(token_format: TokenFormat, hidden_size: int, dtype: Any) -> bool:
    """Whether tokens of this size and dtype cross as codes: if that takes fewer bytes."""
    if not isinstance(token_format, QuantizedFormat):
        return False
    plain_bytes = hidden_size * jnp.dtype(dtype).itemsize
    return encoded_bytes(token_format, hidden_size) < plain_bytes


def token_bytes(token_format: TokenFormat, hidden_size: int, dtype: Any) -> int:
    """Bytes of a token that crosses, without its ids and weights."""
    if isinstance(token_format, QuantizedFormat) and crosses_encoded(
        token_format, hidden_size, dtype
    ):
        return encoded_bytes(token_format, hidden_size)
    return hidden_size * jnp.dtype(dtype).itemsize


def max_token_bytes(token_format: TokenFormat, hidden_size: int) -> int:
    """`token_bytes` of the dtype, among those that the format takes, that needs most."""
    return max(token_bytes(token_format, hidden_size, each) for each in token_format.token_dtypes)


def encode(operands: DispatchOperands) -> DispatchOperands:
    """The operands with tokens as they cross: `uint32[T, W]` if encoded.

    Encoded tokens have no gradient, and need no `input_scale` any more.
    """
    token_format, tokens = operands.token_format, operands.tokens
    if not isinstance(token_format, QuantizedFormat):
        return operands  # also if the caller has quantized them
    if not crosses_encoded(token_format, tokens.shape[1], tokens.dtype):
        return operands
    tokens = lax.stop_gradient(tokens)
    codes, scales = token_format.quantize(tokens, operands.input_scale)
    scale_bytes = _scale_bytes(token_format, tokens.shape[1])
    words = jnp.concatenate([_as_words(scales, scale_bytes), _as_words(codes)], axis=1)
    return dataclasses.replace(operands, tokens=words, input_scale=None)


def _scale_bytes(token_format: QuantizedFormat, hidden_size: int) -> int:
    """Bytes of a token's scales, with padding."""
    assert token_format.scale_dtype is not None
    n_bytes = token_format.n_scales(hidden_size) * token_format.scale_dtype.itemsize
    return -(-n_bytes // VECTOR_BYTES) * VECTOR_BYTES


def _as_words(x: jax.Array, n_bytes: int | None = None) -> jax.Array:
    """`uint32[T, n_bytes / 4]`, from `[T, n]`, with zeros at the end."""
    n_padding = 0 if n_bytes is None else n_bytes // x.dtype.itemsize - x.shape[1]
    if x.dtype.itemsize < _WORD_BYTES:
        x = lax.bitcast_convert_type(x, jnp.uint8)
    x = jnp.pad(x, ((0, 0), (0, n_padding)))
    if x.dtype.itemsize < _WORD_BYTES:
        x = x.reshape(x.shape[0], x.shape[1] // _WORD_BYTES, _WORD_BYTES)
    return lax.bitcast_convert_type(x, jnp.uint32)
