"""Base classes of token formats: sizes, dtypes and, for formats that quantize, arithmetic."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.formats import bits
from jax_ep.formats.scales import ATOMS, NO_SCALES, ROW_MAJOR, ScalesLayout, group_of


class CheckedDataclass:
    """A base of frozen dataclasses whose unpickled fields go through `__post_init__`.

    Fields that a pickle of an earlier version lacks get their defaults.
    """

    def __setstate__(self, state: Any) -> None:
        """Initializes the object again, with the fields of the pickle."""
        name = type(self).__name__
        if not isinstance(state, dict):
            raise TypeError(
                f"A pickled {name} must hold a dict of its fields; got {type(state).__name__}."
            )
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        for key in state.keys() - {each.name for each in fields}:
            raise ValueError(
                f"A pickled {name} has a field {key!r}, which this version of jax_ep does not "
                "know. Make the object again."
            )
        self.__init__(**state)  # type: ignore[misc]


class TokenFormat(CheckedDataclass, abc.ABC):
    """The form in which `dispatch` takes tokens and returns rows; frozen and hashable."""

    takes_input_scale: ClassVar[bool] = False
    scale_dtype: ClassVar[np.dtype | None] = None

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
        """Dtype of the rows that `dispatch` returns."""

    @property
    def returns_gradient(self) -> bool:
        """Whether the backward of dispatch returns the gradient of the tokens.

        If not, another call does: that of `straight_through` in exchange/base.py.
        """
        return False

    @property
    def layout(self) -> ScalesLayout:
        """Where the scales of the rows are."""
        return NO_SCALES

    def row_size(self, hidden_size: int) -> int:
        """Elements of a row of `Dispatched.tokens`."""
        return hidden_size

    def n_scales(self, hidden_size: int) -> int:
        """Scales per token."""
        return 0

    def payload_bytes(self, hidden_size: int) -> int:
        """Bytes of a row of `Dispatched.tokens`."""
        return self.row_size(hidden_size) * self.row_dtype.itemsize

    def token_bytes(self, hidden_size: int) -> int:
        """Bytes of a token on the wire: payload and scales."""
        scale_bytes = self.scale_dtype.itemsize if self.scale_dtype else 0
        return self.payload_bytes(hidden_size) + self.n_scales(hidden_size) * scale_bytes

    def check_hidden_size(self, hidden_size: int) -> None:
        """Raises ValueError if the format cannot carry tokens of this size."""
        return


def check_is_format(value: Any, where: str = "") -> None:
    """Requires a token format."""
    if not isinstance(value, TokenFormat):
        advice = " Call it." if callable(value) else ""
        raise ValueError(
            f"{where}token_format must be a token format such as jax_ep.BF16(); got {value!r}."
            f"{advice}"
        )


def check_is_array(where: str, name: str, x: Any) -> None:
    """Requires an array, or what JAX traces in place of one."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise TypeError(f"{where}: {name} must be an array; got {type(x).__name__}.")


class Quantized(NamedTuple):
    """Quantized tokens.

    Attributes:
        codes: float8_e4m3fn `[..., H]`; or two e2m1 numbers per byte, the even one in the low
            nibble, uint8 `[..., H / 2]`.
        scales: `[..., H / V]`, one per block of V elements.
    """

    codes: jax.Array
    scales: jax.Array


_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class QuantizedFormat(TokenFormat):
    """A format in which `block_size` elements share a scale.

    Arithmetic is in float32, each operation rounded once, subnormals kept. A block with a NaN or an
    infinity is dead: its elements count as 0. Other blocks are not affected. A number beyond
    `largest` counts as `largest`, with its sign.

    Attributes:
        scales_layout: name of one of `scales_layouts`: `"atoms"`, the 128 x 4 tiles that matrix
            units read, or `"row_major"`; `BlockwiseFP8` has others.
        block_size: elements that share a scale (V).
        element: `"e4m3"` or `"e2m1"`: how an element is encoded.
        packed: whether codes are stored two per byte.
        largest: bound on magnitudes. Codes of finite numbers stand for finite numbers, also once
            these are rounded to bfloat16.
        scales_layouts: the layouts to choose from.
    """

    scales_layout: str = ATOMS.name

    block_size: ClassVar[int]
    element: ClassVar[str]
    packed: ClassVar[bool]
    largest: ClassVar[float]
    scales_layouts: ClassVar[tuple[ScalesLayout, ...]] = (ATOMS, ROW_MAJOR)

    def __post_init__(self) -> None:
        names = [layout.name for layout in self.scales_layouts]
        if self.scales_layout not in names:
            raise ValueError(
                f"{type(self).__name__}: scales_layout must be one of "
                f"{', '.join(map(repr, names))}; got {self.scales_layout!r}."
            )

    @abc.abstractmethod
    def encode_scales(self, amax: jax.Array, input_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A block's scale, and the factor that its elements are multiplied by.

        Args:
            amax: uint32 bit patterns of the largest magnitude of each block.
            input_scale: uint32 bit pattern, one for all tokens or one per token.

        Returns:
            The scales, in `scale_dtype`; the factors for `scale_elements`, uint32.
        """

    def scale_elements(self, magnitudes: jax.Array, factor: jax.Array) -> jax.Array:
        """Scaled magnitudes, to be rounded to codes; all are bit patterns."""
        return bits.multiply(magnitudes, factor)

    def decode_scales(self, scales: jax.Array, input_scale: jax.Array) -> jax.Array:
        """The factors that codes are multiplied by, float32."""
        return scales.astype(jnp.float32)

    @property
    def layout(self) -> ScalesLayout:
        """Where the scales of the rows are."""
        return next(x for x in self.scales_layouts if x.name == self.scales_layout)

    @property
    def token_dtypes(self) -> tuple[np.dtype, ...]:
        """bfloat16 and float32."""
        return (np.dtype(jnp.bfloat16), np.dtype(jnp.float32))

    @property
    def row_dtype(self) -> np.dtype:
        """float8_e4m3fn; uint8 for packed codes."""
        return np.dtype(np.uint8) if self.packed else _FLOAT8

    def row_size(self, hidden_size: int) -> int:
        """H, or H / 2 for packed codes."""
        return hidden_size // 2 if self.packed else hidden_size

    def n_scales(self, hidden_size: int) -> int:
        """H / V."""
        return hidden_size // self.block_size

    def check_hidden_size(self, hidden_size: int) -> None:
        """Raises ValueError unless H is a multiple of the block size."""
        if hidden_size % self.block_size:
            raise ValueError(
                f"hidden_size must be a multiple of {self.block_size} for {self.name}, which has "
                f"one scale per {self.block_size} elements; got hidden_size={hidden_size}."
            )

    def quantize(self, tokens: jax.Array, input_scale: jax.Array | None = None) -> Quantized:
        """Quantizes tokens: the reference for every transport, to the last bit.

        Args:
            tokens: `[..., H]`, bfloat16 or float32.
            input_scale: `float32[]`, or `float32[...]` with one per token, for formats that take
                one; otherwise None.

        Returns:
            Codes, and scales row by row, whatever `scales_layout` is.

        Raises:
            TypeError: `tokens` is not an array.
            ValueError: H is not a multiple of the block size, or another dtype.
        """
        check_is_array(self.name, "tokens", tokens)
        if not tokens.shape:
            raise ValueError(f"{self.name}: tokens must have the shape [..., H]; got ().")
        if tokens.dtype not in self.token_dtypes:
            raise ValueError(
                f"{self.name}: tokens must be bfloat16 or float32; got {tokens.dtype.name}."
            )
        self.check_hidden_size(tokens.shape[-1])
        return _quantize(self, tokens, _input_scale_bits(input_scale))

    def dequantize(
        self,
        quantized: Quantized,
        input_scale: jax.Array | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """The numbers that `quantize` encoded, given the same `input_scale`.

        `[..., H]` in `dtype`, computed in float32, where XLA may flush subnormals to zero.

        Raises:
            TypeError: `quantized` is not `Quantized`.
            ValueError: codes and scales have other dtypes, or do not fit each other.
        """
        _check_quantized(self, quantized)
        return _dequantize(self, quantized, _input_scale_bits(input_scale), dtype)

    def dequantize_rows(
        self,
        codes: jax.Array,
        scales: jax.Array,
        row_offsets: jax.Array,
        input_scale: jax.Array | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """The numbers of rows, `[C, H]`, zero in unused rows.

        Args:
            codes: `[C, H]` or `[C, H / 2]`.
            scales: in `scales_layout`.
            row_offsets: `uint32[L + 1]`.
            input_scale: as given to the quantization: `float32[]`, or `float32[L]`, one per group.
            dtype: of the result.
        """
        n_rows, size = codes.shape
        n_scales = self.n_scales(2 * size if self.packed else size)
        by_row = self.layout.by_row(scales, row_offsets, n_rows, n_scales)
        row = jnp.arange(n_rows, dtype=jnp.int32)
        starts = row_offsets.astype(jnp.int32)
        if input_scale is not None and input_scale.ndim:
            input_scale = input_scale[group_of(starts, n_rows)]
        rows = self.dequantize(Quantized(codes, by_row), input_scale, dtype)
        return jnp.where((row < starts[-1])[:, None], rows, jnp.zeros((), dtype))


def _check_quantized(token_format: QuantizedFormat, quantized: Any) -> None:
    """Requires codes `[..., H]` or `[..., H / 2]`, and the scales of their blocks."""
    name = token_format.name
    if not isinstance(quantized, Quantized):
        raise TypeError(
            f"{name}: quantized must be jax_ep.Quantized(codes, scales), as quantize() returns it; "
            f"got {type(quantized).__name__}."
        )
    codes, scales = quantized
    wanted = {"codes": token_format.row_dtype, "scales": token_format.scale_dtype}
    for field, dtype in wanted.items():
        x = getattr(quantized, field)
        check_is_array(name, f"quantized.{field}", x)
        if x.dtype != dtype:
            raise ValueError(f"{name}: quantized.{field} must be {dtype}; got {x.dtype.name}.")
    if not codes.shape:
        raise ValueError(f"{name}: quantized.codes must have the shape [..., H]; got ().")
    size = codes.shape[-1] * (2 if token_format.packed else 1)
    token_format.check_hidden_size(size)
    shape = (*codes.shape[:-1], token_format.n_scales(size))
    if scales.shape != shape:
        raise ValueError(
            f"{name}: quantized.scales must be one per {token_format.block_size} elements, "
            f"{shape}; got {scales.shape}. Those in the rows of a dispatch may be in another "
            "layout: jax_ep.dequantize() takes them."
        )


def _input_scale_bits(input_scale: jax.Array | None) -> jax.Array:
    """The bit pattern of an input scale; 0, which zeroes all blocks, if unusable."""
    if input_scale is None:
        return jnp.asarray(bits.constant(1))
    pattern = bits.to_bits(jnp.asarray(input_scale, jnp.float32))
    return jnp.where(pattern < bits.INFINITY, pattern, np.uint32(0))


# Jitted as a whole: called eagerly, a hundred small operations would take seconds.
@functools.partial(jax.jit, static_argnums=0)
def _quantize(
    token_format: QuantizedFormat, tokens: jax.Array, input_scale: jax.Array
) -> Quantized:
    patterns = _split_last(bits.to_bits(tokens), token_format.block_size)
    magnitudes = patterns & np.uint32(bits.SIGN - 1)
    amax = magnitudes.max(axis=-1)  # NaN has the largest bits
    is_dead = (amax >= bits.INFINITY)[..., None]

    def bounded(x: jax.Array, is_dead: jax.Array) -> jax.Array:
        x = jnp.minimum(x, bits.constant(token_format.largest))
        return jnp.where(is_dead, np.uint32(0), x)

    scales, factor = token_format.encode_scales(bounded(amax, is_dead[..., 0]), input_scale)
    magnitudes = bounded(magnitudes, is_dead)
    magnitudes = token_format.scale_elements(magnitudes, factor[..., None])
    is_negative = jnp.where(is_dead, np.uint32(0), patterns >> 31)
    if token_format.element == "e2m1":
        codes = bits.to_e2m1(magnitudes) | is_negative << 3
    else:
        codes = bits.to_e4m3(magnitudes) | is_negative << 7
    if token_format.packed:
        codes = _split_last(codes.reshape(tokens.shape), 2)
        codes = (codes[..., 0] | codes[..., 1] << 4).astype(jnp.uint8)
        return Quantized(codes, scales)
    codes = jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), _FLOAT8)
    return Quantized(codes.reshape(tokens.shape), scales)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _dequantize(
    token_format: QuantizedFormat,
    quantized: Quantized,
    input_scale: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    values = _decode(token_format, quantized.codes)
    blocks = _split_last(values, token_format.block_size)
    scales = token_format.decode_scales(quantized.scales, bits.to_float(input_scale))
    return (blocks * scales[..., None]).reshape(values.shape).astype(dtype)


def _decode(token_format: QuantizedFormat, codes: jax.Array) -> jax.Array:
    if not token_format.packed:
        return codes.astype(jnp.float32)
    table = jnp.asarray([*_E2M1_VALUES, *(-x for x in _E2M1_VALUES)], jnp.float32)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1)
    return table[nibbles].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _split_last(x: jax.Array, size: int) -> jax.Array:
    """`[..., n / size, size]`, from `[..., n]`; also for no tokens, where -1 has no value."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
