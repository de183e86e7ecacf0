"""MXFP8 and MXFP4: a power of two as the scale of 32 elements."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.formats import bits
from jax_ep.formats.base import QuantizedFormat


@dataclasses.dataclass(frozen=True)
class _MXFormat(QuantizedFormat):
    """A byte b as scale, 2^(b - 127): `code = round(x * 2^(127 - b))`."""

    @property
    def block_size(self) -> int:
        """32."""
        return 32

    @property
    def scale_dtype(self) -> np.dtype:
        """float8_e8m0fnu."""
        return np.dtype(jnp.float8_e8m0fnu)

    @abc.abstractmethod
    def scale_exponents(self, amax: jax.Array) -> jax.Array:
        """The byte, 0 ... 254, for the largest magnitude; both uint32."""

    def encode_scales(
        self, amax: jax.Array, input_scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The byte, and the pattern of the scale's reciprocal; 0 for a zero block."""
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
    """float8_e4m3fn with an E8M0 scale for each 1 x 32 block (OCP MX v1.0).

    `scale = amax * (1 / 448)` rounded up to a power of two, so that nothing saturates;
    `code = e4m3(x / scale)`, `x ~ code * scale`.

    Attributes:
        scales_layout: `"atoms"`, the 128 x 4 tiles that matrix units read, or
            `"row_major"`, `[C, H / 32]`.
    """

    @property
    def name(self) -> str:
        """`mxfp8`."""
        return "mxfp8"

    @property
    def is_packed(self) -> bool:
        """False."""
        return False

    def scale_exponents(self, amax: jax.Array) -> jax.Array:
        """The exponent of the smallest power of two that is not below."""
        raw = bits.multiply(amax, jnp.full_like(amax, bits.constant(1 / 448)))
        exponent, fraction = raw >> 23, raw & np.uint32((1 << 23) - 1)
        # The pattern of 2^-127, the smallest scale, is that of half a smallest normal.
        up = jnp.where(exponent > 0, fraction > 0, fraction > np.uint32(1 << 22))
        return exponent + up.astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class MXFP4(_MXFormat):
    """e2m1, two per byte, with an E8M0 scale for each 1 x 32 block (OCP MX v1.0).

    `scale` is the power of two two below that of `amax` rounded in "even mode": from
    1.75 on it counts as the next one. `code = e2m1(x / scale)`, at most 6.

    Attributes:
        scales_layout: `"atoms"`, the 128 x 4 tiles that matrix units read, or
            `"row_major"`, `[C, H / 32]`.
    """

    @property
    def name(self) -> str:
        """`mxfp4`."""
        return "mxfp4"

    @property
    def is_packed(self) -> bool:
        """True."""
        return True

    def scale_exponents(self, amax: jax.Array) -> jax.Array:
        """The exponent of amax + a quarter of its binade, less 2, at least 0."""
        exponent = (amax + np.uint32(1 << 21)) >> 23
        return jnp.maximum(exponent, np.uint32(2)) - np.uint32(2)
