"""BlockwiseFP8: e4m3 with one float32 scale per 128 elements."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.formats import bits
from jax_ep.formats.base import QuantizedFormat
from jax_ep.formats.scales import ROW_MAJOR, TRANSPOSED

_E4M3_MAX = 448
_MIN_AMAX = 1e-4  # as in DeepEP; keeps scales away from zero


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
    scale_dtype = np.dtype(jnp.float32)
    scales_layouts = (TRANSPOSED, ROW_MAJOR)

    def encode_scales(self, amax: jax.Array, input_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`max(amax, 1e-4) / 448`, both as scale and as factor."""
        amax = jnp.maximum(amax, bits.constant(_MIN_AMAX))
        scale = bits.divide(amax, jnp.full_like(amax, bits.constant(_E4M3_MAX)))
        return bits.to_float(scale), scale

    def scale_elements(self, magnitudes: jax.Array, factor: jax.Array) -> jax.Array:
        """The quotient."""
        return bits.divide(magnitudes, jnp.broadcast_to(factor, magnitudes.shape))
