"""NVFP4: e2m1 with one e4m3 scale per 16 elements and one global scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.formats import bits
from jax_ep.formats.base import QuantizedFormat


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
