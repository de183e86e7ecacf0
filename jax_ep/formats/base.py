"""What a token format is: sizes, dtypes and, where it quantises, the arithmetic."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.formats import bits
from jax_ep.formats.scales import (
    ATOMS,
    NO_SCALES,
    ROW_MAJOR,
    ScalesLayout,
    group_of,
)


class TokenFormat(abc.ABC):
    """What `dispatch` takes and what it hands to the experts.

    Frozen and hashable: a format is part of `EPConfig`, and a static parameter.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name in attributes and messages."""

    @property
    @abc.abstractmethod
    def token_dtypes(self) -> tuple[np.dtype, ...]:
        """Dtypes of the `tokens` that `dispatch` takes."""

    @property
    @abc.abstractmethod
    def row_dtype(self) -> np.dtype:
        """Dtype of the rows that `dispatch` gives."""

    @property
    def layout(self) -> ScalesLayout:
        """Where the scales of the rows stand."""
        return NO_SCALES

    @property
    def takes_input_scale(self) -> bool:
        """Whether `dispatch` takes an `input_scale`."""
        return False

    def row_size(self, hidden_size: int) -> int:
        """Elements of a row of `Dispatched.tokens`."""
        return hidden_size

    def n_scales(self, hidden_size: int) -> int:
        """Scales of a token."""
        return 0

    @property
    def scale_dtype(self) -> np.dtype | None:
        """Dtype of the scales, or None."""
        return None

    def payload_bytes(self, hidden_size: int) -> int:
        """Bytes of a row of `Dispatched.tokens`."""
        return self.row_size(hidden_size) * self.row_dtype.itemsize

    def token_bytes(self, hidden_size: int) -> int:
        """Bytes of one token on its way: payload and scales."""
        scale_bytes = self.scale_dtype.itemsize if self.scale_dtype else 0
        return (
            self.payload_bytes(hidden_size) + self.n_scales(hidden_size) * scale_bytes
        )

    def check_hidden_size(self, hidden_size: int) -> None:
        """Raises ValueError if the format cannot carry tokens of this size."""
        return


class Quantized(NamedTuple):
    """Tokens in fewer bits.

    Attributes:
        codes: `[..., H]` float8_e4m3fn, or `[..., H / 2]` uint8: two e2m1 numbers per
            byte, the even element in the low nibble.
        scales: `[..., H / V]`, one for V elements.
    """

    codes: jax.Array
    scales: jax.Array


_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class QuantizedFormat(TokenFormat):
    """A format in which `block_size` elements share a scale.

    A subclass says how a scale follows from the largest magnitude of its block, and
    what is encoded: all arithmetic is float32, each operation rounded once, subnormals
    kept. A block that holds a NaN or an infinity is dead: it is as if all its elements
    were 0, and no other block notices.
    """

    scales_layout: str = ATOMS.name

    def __post_init__(self) -> None:
        names = [layout.name for layout in self._layouts]
        if self.scales_layout not in names:
            raise ValueError(
                f"{type(self).__name__}: scales_layout must be one of "
                f"{', '.join(map(repr, names))}; got {self.scales_layout!r}."
            )

    @property
    def layout(self) -> ScalesLayout:
        """Where the scales of the rows stand."""
        return next(each for each in self._layouts if each.name == self.scales_layout)

    @property
    def _layouts(self) -> tuple[ScalesLayout, ...]:
        """The layouts to choose from."""
        return (ATOMS, ROW_MAJOR)

    @property
    @abc.abstractmethod
    def block_size(self) -> int:
        """Elements that share a scale (V)."""

    @property
    @abc.abstractmethod
    def is_packed(self) -> bool:
        """Whether elements are e2m1, two per byte; else e4m3."""

    @abc.abstractmethod
    def encode_scales(
        self, amax: jax.Array, input_scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A block's scale, and what its elements are multiplied or divided by.

        Args:
            amax: uint32 pattern of the largest magnitude of each block.
            input_scale: uint32 pattern, one for all or one per token.

        Returns:
            The scales, in `scale_dtype`; the factors for `scale_elements`, uint32.
        """

    def scale_elements(self, magnitudes: jax.Array, factor: jax.Array) -> jax.Array:
        """What is rounded to a code: patterns, of patterns and their block's factor."""
        return bits.multiply(magnitudes, factor)

    def decode_scales(self, scales: jax.Array, input_scale: jax.Array) -> jax.Array:
        """What codes are multiplied by, float32."""
        return scales.astype(jnp.float32)

    @property
    def token_dtypes(self) -> tuple[np.dtype, ...]:
        """bfloat16 and float32."""
        return (np.dtype(jnp.bfloat16), np.dtype(jnp.float32))

    @property
    def row_dtype(self) -> np.dtype:
        """float8_e4m3fn; uint8 where elements are packed."""
        return np.dtype(np.uint8) if self.is_packed else _FLOAT8

    def row_size(self, hidden_size: int) -> int:
        """H, or H / 2 where elements are packed."""
        return hidden_size // 2 if self.is_packed else hidden_size

    def n_scales(self, hidden_size: int) -> int:
        """H / V."""
        return hidden_size // self.block_size

    def check_hidden_size(self, hidden_size: int) -> None:
        """Raises ValueError unless blocks fill a token."""
        if hidden_size % self.block_size:
            raise ValueError(
                f"hidden_size must be a multiple of {self.block_size} for {self.name}, "
                f"whose scales are of {self.block_size} elements each; got "
                f"hidden_size={hidden_size}."
            )

    def quantize(
        self, tokens: jax.Array, input_scale: jax.Array | None = None
    ) -> Quantized:
        """Tokens in this format: the reference for every transport, to the last bit.

        Args:
            tokens: `[..., H]`, bfloat16 or float32.
            input_scale: `float32[]`, or `float32[...]` with one per token, for formats
                that take one, else None.

        Returns:
            Codes and scales; the scales row by row, whatever `scales_layout` is.

        Raises:
            ValueError: H is not a multiple of the block size.
        """
        self.check_hidden_size(tokens.shape[-1])
        return _quantize(self, tokens, _input_scale_bits(input_scale))

    def dequantize(
        self,
        quantized: Quantized,
        input_scale: jax.Array | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """The numbers that codes and scales stand for, `[..., H]` in `dtype`.

        Computed in float32, where XLA may flush subnormal numbers to zero.

        Args:
            quantized: scales row by row, as `quantize` gives them.
            input_scale: as given to `quantize`.
            dtype: of the result.
        """
        return _dequantize(self, quantized, _input_scale_bits(input_scale), dtype)

    def dequantize_rows(
        self,
        codes: jax.Array,
        scales: jax.Array,
        row_offsets: jax.Array,
        input_scale: jax.Array | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """The numbers of rows whose scales stand in this format's layout.

        Args:
            codes: `[C, H]` or `[C, H / 2]`.
            scales: in `scales_layout`.
            row_offsets: `uint32[L + 1]`.
            input_scale: as given when they were quantised: `float32[]`, or `float32[L]`
                with one per group.
            dtype: of the result.

        Returns:
            `[C, H]`, zero in rows that are not in use.
        """
        n_rows, size = codes.shape
        hidden_size = 2 * size if self.is_packed else size
        by_row = self.layout.by_row(
            scales, row_offsets, n_rows, self.n_scales(hidden_size)
        )
        row = jnp.arange(n_rows, dtype=jnp.int32)
        starts = row_offsets.astype(jnp.int32)
        if input_scale is not None and input_scale.ndim:
            input_scale = input_scale[group_of(starts, row)]
        rows = self.dequantize(Quantized(codes, by_row), input_scale, dtype)
        return jnp.where((row < starts[-1])[:, None], rows, jnp.zeros((), dtype))


def _input_scale_bits(input_scale: jax.Array | None) -> jax.Array:
    """The pattern of an input scale; zero, which no block survives, if unusable."""
    if input_scale is None:
        return jnp.asarray(bits.constant(1))
    pattern = bits.to_bits(jnp.asarray(input_scale, jnp.float32))
    return jnp.where(pattern < bits.INFINITY, pattern, np.uint32(0))


# Compiled as one: called eagerly, a hundred small operations would take seconds.
@functools.partial(jax.jit, static_argnums=0)
def _quantize(
    token_format: QuantizedFormat, tokens: jax.Array, input_scale: jax.Array
) -> Quantized:
    leading, size = tokens.shape[:-1], token_format.block_size
    patterns = bits.to_bits(tokens).reshape(*leading, -1, size)
    magnitudes = patterns & np.uint32(bits.SIGN - 1)
    is_dead = (magnitudes >= bits.INFINITY).any(axis=-1, keepdims=True)
    magnitudes = jnp.where(is_dead, np.uint32(0), magnitudes)
    scales, factor = token_format.encode_scales(magnitudes.max(axis=-1), input_scale)
    magnitudes = token_format.scale_elements(magnitudes, factor[..., None])
    is_negative = jnp.where(is_dead, np.uint32(0), patterns >> 31)
    if token_format.is_packed:
        codes = bits.to_e2m1(magnitudes) | is_negative << 3
        codes = codes.reshape(*leading, -1, 2)
        codes = (codes[..., 0] | codes[..., 1] << 4).astype(jnp.uint8)
        return Quantized(codes, scales)
    codes = (bits.to_e4m3(magnitudes) | is_negative << 7).astype(jnp.uint8)
    codes = jax.lax.bitcast_convert_type(codes, _FLOAT8)
    return Quantized(codes.reshape(tokens.shape), scales)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _dequantize(
    token_format: QuantizedFormat,
    quantized: Quantized,
    input_scale: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    values = _decode(token_format, quantized.codes)
    blocks = values.reshape(*values.shape[:-1], -1, token_format.block_size)
    scales = token_format.decode_scales(quantized.scales, bits.to_float(input_scale))
    return (blocks * scales[..., None]).reshape(values.shape).astype(dtype)


def _decode(token_format: QuantizedFormat, codes: jax.Array) -> jax.Array:
    if not token_format.is_packed:
        return codes.astype(jnp.float32)
    table = jnp.asarray(
        [*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], jnp.float32
    )
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1)
    return table[nibbles].reshape(*codes.shape[:-1], -1)
