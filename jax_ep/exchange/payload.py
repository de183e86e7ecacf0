"""The payload of a token: the token, or codes and scales that the caller has made.

Codes and scales travel as words of a format that does not quantize, and are codes and scales again
in the rows that arrive.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.config import EPConfig
from jax_ep.exchange import checks
from jax_ep.exchange.rows import in_use
from jax_ep.formats import Plain, Quantized, QuantizedFormat, TokenFormat
from jax_ep.formats.plain import FLOATS

# Words are numbers that nothing computes with. XLA:CPU converts bfloat16, but not float32.
_WORDS = Plain(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Payload:
    """Checked tokens, in the form in which they travel."""

    tokens: Any  # [..., H], or [..., W] words
    token_format: TokenFormat  # that travels
    hidden_size: int  # H

    @classmethod
    def make(cls, operation: str, config: EPConfig, tokens: Any) -> Self:
        """From the `tokens` of a dispatch."""
        if isinstance(tokens, tuple) and not isinstance(tokens, Quantized):
            raise ValueError(
                f"{operation}: tokens must be an array or jax_ep.Quantized(codes, scales); got a "
                "tuple."
            )
        if isinstance(tokens, Quantized):
            return cls._from_codes(operation, config, tokens)
        (tokens,) = checks.as_arrays(operation, tokens=tokens)
        size = checks.row_size(tokens, config.hidden_size)
        _check_plain_dtype(operation, config.token_format, tokens)
        _check_shape(operation, "tokens", tokens, size, "H", config.token_format.token_dtypes)
        if size < config.hidden_size:
            token_bytes = size * tokens.dtype.itemsize
            _check_narrow(operation, config.token_format, "tokens", size, token_bytes)
        return cls(tokens, config.token_format, size)._limited(operation, config)

    @classmethod
    def _from_codes(cls, operation: str, config: EPConfig, tokens: Quantized) -> Self:
        token_format = config.token_format
        if not isinstance(token_format, QuantizedFormat):
            raise ValueError(
                f"{operation}: tokens may be Quantized only if the group's token_format quantizes; "
                f"it is {token_format.name}."
            )
        named = {"tokens.codes": tokens.codes, "tokens.scales": tokens.scales}
        codes, scales = checks.as_arrays(operation, **named)
        n_codes = checks.row_size(codes, token_format.row_size(config.hidden_size))
        _check_shape(operation, "tokens.codes", codes, n_codes, "H", (token_format.row_dtype,))
        size = 2 * n_codes if token_format.packed else n_codes
        if size < config.hidden_size:
            _check_narrow(operation, token_format, "tokens.codes", size)
        leading, n_scales = codes.shape[:-1], token_format.n_scales(size)
        dtype = token_format.scale_dtype
        checks.check_per_token(operation, "tokens.scales", scales, leading, n_scales, "S", dtype)
        words = lax.stop_gradient(_pack(codes, scales))
        return cls(words, _WORDS, size)._limited(operation, config)

    def _limited(self, operation: str, config: EPConfig) -> Self:
        """This payload, if there are not too many tokens."""
        n_tokens = math.prod(self.leading)
        if n_tokens > config.max_tokens_per_rank:
            raise ValueError(
                f"{operation}: there must be at most "
                f"max_tokens_per_rank={config.max_tokens_per_rank} tokens on each rank; got "
                f"{n_tokens} on each. Raise EPConfig.max_tokens_per_rank, or pass fewer tokens."
            )
        return self

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading dimensions of the tokens; there is at least one."""
        return self.tokens.shape[:-1]


def unpack(
    token_format: QuantizedFormat, words: jax.Array, hidden_size: int, row_offsets: jax.Array
) -> Quantized:
    """Codes and scales of rows that arrived as words `[C, W]`; scales in the format's layout."""
    n_codes, n_scales = token_format.row_size(hidden_size), token_format.n_scales(hidden_size)
    data = _as_bytes(lax.stop_gradient(words))
    end = n_codes * token_format.row_dtype.itemsize
    codes = _from_bytes(data[:, :end], token_format.row_dtype)
    assert token_format.scale_dtype is not None
    scales = data[:, end : end + n_scales * token_format.scale_dtype.itemsize]
    # A block of atoms also has scales of rows that are not in use.
    scales = jnp.where(in_use(row_offsets, words.shape[0]), scales, jnp.uint8(0))
    by_row = _from_bytes(scales, token_format.scale_dtype)
    return Quantized(codes, token_format.layout.place(by_row, row_offsets))


def _pack(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """`float32[..., W]`: the bytes of codes, then of scales, then zeros."""
    data = jnp.concatenate([_as_bytes(codes), _as_bytes(scales)], axis=-1)
    rest = -data.shape[-1] % checks.VECTOR_BYTES
    data = jnp.pad(data, [*[(0, 0)] * (data.ndim - 1), (0, rest)])
    return _from_bytes(data, jnp.float32)


def _as_bytes(x: jax.Array) -> jax.Array:
    data = lax.bitcast_convert_type(x, jnp.uint8)
    return data.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def _from_bytes(data: jax.Array, dtype: Any) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        data = data.reshape(*data.shape[:-1], data.shape[-1] // size, size)
    return lax.bitcast_convert_type(data, dtype)


def _check_plain_dtype(operation: str, token_format: TokenFormat, tokens: Any) -> None:
    """Requires tokens in the dtype of a plain format, if another plain format takes theirs."""
    if tokens is None or isinstance(token_format, QuantizedFormat) or tokens.dtype not in FLOATS:
        return
    name = tokens.dtype.name
    if tokens.dtype not in token_format.token_dtypes:
        raise ValueError(
            f"{operation}: tokens must be {token_format.token_dtypes[0].name}; got {name}. Cast "
            "them with .astype(), or make the group with EPConfig(..., "
            f"token_format=jax_ep.Plain({name!r}), combine_dtype={name!r})."
        )


def _check_shape(
    operation: str, name: str, x: Any, size: int, letter: str, dtypes: tuple[Any, ...]
) -> None:
    """Requires `[..., size]`, with at least one leading dimension."""
    if x is None or x.ndim < 3:
        checks.check_array(operation, name, x, (None, size), f"T {letter}", *dtypes)
    else:
        checks.check_per_token(operation, name, x, x.shape[:-1], size, letter, *dtypes)


def _check_narrow(
    operation: str, token_format: TokenFormat, name: str, size: int, *n_bytes: int
) -> None:
    """Requires whole vectors and blocks of tokens that have fewer elements than the group's."""
    checks.check_narrow_rows(operation, name, size, *n_bytes, token_format.payload_bytes(size))
    try:
        token_format.check_hidden_size(size)
    except ValueError as error:
        raise ValueError(f"{operation}: {name}: {error}") from None
