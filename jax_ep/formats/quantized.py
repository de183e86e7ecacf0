"""The formats that quantize: BlockwiseFP8; MXFP8 and MXFP4 (OCP MX v1.0); NVFP4."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.formats import bits
from jax_ep.formats.base import QuantizedFormat
from jax_ep.formats.scales import ROW_MAJOR, TRANSPOSED

_E4M3_MAX = 448


@dataclasses.dataclass(frozen=True)
class BlockwiseFP8(QuantizedFormat):
    """float8_e4m3fn with one float32 scale per 1 x 128 block.

    `scale = max(amax, 1e-4) / 448`, `code = e4m3(x / scale)`, `x ~ code * scale`.

    Attributes:
        scales_layout: `"transposed"` is `float32[H / 128, C]`, with every group of rows starting at
            a multiple of 4 rows, so that its scales start at a multiple of 16 bytes; `"row_major"`
            is `float32[C, H / 128]`.
    """

    scales_layout: str = TRANSPOSED.name

    name = "blockwise_fp8"
    block_size = 128
    element = "e4m3"
    packed = False
    largest = float.fromhex("0x1.fep127")  # of bfloat16
    min_amax = 1e-4  # as in DeepEP; keeps scales away from zero
    scale_dtype = np.dtype(jnp.float32)
    scales_layouts = (TRANSPOSED, ROW_MAJOR)

    def encode_scales(self, amax: jax.Array, input_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`max(amax, min_amax) / 448`, both as scale and as factor."""
        amax = jnp.maximum(amax, bits.constant(self.min_amax))
        scale = bits.divide(amax, jnp.full_like(amax, bits.constant(_E4M3_MAX)))
        return bits.to_float(scale), scale

    def scale_elements(self, magnitudes: jax.Array, factor: jax.Array) -> jax.Array:
        """The quotient."""
        return bits.divide(magnitudes, jnp.broadcast_to(factor, magnitudes.shape))


@dataclasses.dataclass(frozen=True)
class _MXFormat(QuantizedFormat):
    """The scale is a byte b that stands for 2^(b - 127): `code = x * 2^(127 - b)`."""

    block_size = 32
    scale_dtype = np.dtype(jnp.float8_e8m0fnu)

    @abc.abstractmethod
    def scale_exponents(self, amax: jax.Array) -> jax.Array:
        """The byte, 0 to 254, for the largest magnitude; both uint32."""

    def encode_scales(self, amax: jax.Array, input_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The byte, and the scale's reciprocal; 0 for a block of zeros."""
        byte = self.scale_exponents(amax)
        reciprocal = jnp.where(byte < 254, (254 - byte) << 23, np.uint32(1 << 22))
        reciprocal = jnp.where(amax == 0, np.uint32(0), reciprocal)
        scales = lax.bitcast_convert_type(byte.astype(jnp.uint8), self.scale_dtype)
        return scales, reciprocal

    def decode_scales(self, scales: jax.Array, input_scale: jax.Array) -> jax.Array:
        """2^(b - 127)."""
        byte = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
        return bits.to_float(jnp.where(byte > 0, byte << 23, np.uint32(1 << 22)))


@dataclasses.dataclass(frozen=True)
class MXFP8(_MXFormat):
    """float8_e4m3fn with one E8M0 scale per 1 x 32 block (OCP MX v1.0).

    `scale = amax * (1 / 448)` rounded up to a power of two, so that nothing saturates; `code =
    e4m3(x / scale)`, `x ~ code * scale`.
    """

    name = "mxfp8"
    element = "e4m3"
    packed = False
    largest = 1.875 * 2.0**127  # 240 * 2^120; the next number is 2^128

    def scale_exponents(self, amax: jax.Array) -> jax.Array:
        """The exponent of the smallest power of two that is at least amax / 448."""
        raw = bits.multiply(amax, jnp.full_like(amax, bits.constant(1 / 448)))
        exponent, fraction = raw >> 23, raw & np.uint32((1 << 23) - 1)
        # 2^-127, the smallest scale, has the bits of half the smallest normal number.
        up = jnp.where(exponent > 0, fraction > 0, fraction > np.uint32(1 << 22))
        return exponent + up.astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class MXFP4(_MXFormat):
    """e2m1, two per byte, with one E8M0 scale per 1 x 32 block (OCP MX v1.0).

    `scale` is 2^-2 times the power of two below `amax`, after rounding `amax` in "even mode": from
    1.75 times a power of two on, the next power of two counts. `code = e2m1(x / scale)`, at most 6.
    """

    name = "mxfp4"
    element = "e2m1"
    packed = True
    largest = 1.5 * 2.0**127  # 6 * 2^125; the next number is 2^128

    def scale_exponents(self, amax: jax.Array) -> jax.Array:
        """The exponent of amax + a quarter of its binade, minus 2, at least 0."""
        exponent = (amax + np.uint32(1 << 21)) >> 23
        return jnp.maximum(exponent, np.uint32(2)) - np.uint32(2)


@dataclasses.dataclass(frozen=True)
class NVFP4(QuantizedFormat):
    """e2m1, two per byte, with one e4m3 scale per 1 x 16 block.

    `scale = e4m3(s * (amax * (1 / 6)))`, `code = e2m1(x * (1 / (scale * (1 / s))))`, at most 6, and
    `x ~ code * scale / s`. Here, s is the `input_scale` of dispatch, by default 1; a checkpoint's
    input scale is the reciprocal of s.
    """

    name = "nvfp4"
    block_size = 16
    element = "e2m1"
    packed = True
    largest = float.fromhex("0x1.ap127")  # codes are rounded up by a fifth at most
    scale_dtype = np.dtype(jnp.float8_e4m3fn)
    takes_input_scale = True

    def encode_scales(self, amax: jax.Array, input_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The e4m3 scale and the factor; 0 where the factor would not be finite."""
        input_scale = jnp.broadcast_to(input_scale[..., None], amax.shape)
        sixth = jnp.full_like(amax, bits.constant(1 / 6))
        raw = bits.multiply(input_scale, bits.multiply(amax, sixth))
        code = bits.to_e4m3(raw).astype(jnp.uint8)
        scales = lax.bitcast_convert_type(code, self.scale_dtype)
        inverse = _finite_reciprocal(input_scale)
        total = bits.multiply(bits.to_bits(scales.astype(jnp.float32)), inverse)
        return scales, _finite_reciprocal(total)

    def decode_scales(self, scales: jax.Array, input_scale: jax.Array) -> jax.Array:
        """`scale * (1 / s)`."""
        inverse = bits.to_float(_finite_reciprocal(bits.to_bits(input_scale)))
        return scales.astype(jnp.float32) * jnp.broadcast_to(inverse[..., None], scales.shape)


def _finite_reciprocal(pattern: jax.Array) -> jax.Array:
    """`1 / x`, and 0 where that is infinite; bit patterns."""
    inverse = bits.reciprocal(pattern)
    return jnp.where(inverse < bits.INFINITY, inverse, np.uint32(0))
