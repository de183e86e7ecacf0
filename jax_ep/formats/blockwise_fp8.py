"""BlockwiseFP8: e4m3 with a float32 scale for 128 elements."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.formats import bits
from jax_ep.formats.base import QuantizedFormat
from jax_ep.formats.scales import ROW_MAJOR, TRANSPOSED, ScalesLayout

_E4M3_MAX = 448
_SMALLEST_AMAX = 1e-4  # DeepEP's: keeps scales away from zero


@dataclasses.dataclass(frozen=True)
class BlockwiseFP8(QuantizedFormat):
    """float8_e4m3fn with a float32 scale for each 1 x 128 block.

    `scale = max(amax, 1e-4) / 448`, `code = e4m3(x / scale)`, `x ~ code * scale`.

    Attributes:
        scales_layout: `"transposed"` gives `float32[H / 128, C]`, and every group of
            rows begins at a multiple of 4 rows, so that its scales begin at a multiple
            of 16 bytes; `"row_major"` gives `float32[C, H / 128]`.
    """

    scales_layout: str = TRANSPOSED.name

    @property
    def name(self) -> str:
        """`blockwise_fp8`."""
        return "blockwise_fp8"

    @property
    def _layouts(self) -> tuple[ScalesLayout, ...]:
        return (TRANSPOSED, ROW_MAJOR)

    @property
    def block_size(self) -> int:
        """128."""
        return 128

    @property
    def is_packed(self) -> bool:
        """False."""
        return False

    @property
    def scale_dtype(self) -> np.dtype:
        """float32."""
        return np.dtype(jnp.float32)

    def encode_scales(
        self, amax: jax.Array, input_scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`max(amax, 1e-4) / 448`, twice."""
        amax = jnp.maximum(amax, bits.constant(_SMALLEST_AMAX))
        scale = bits.divide(amax, jnp.full_like(amax, bits.constant(_E4M3_MAX)))
        return bits.to_float(scale), scale

    def scale_elements(self, magnitudes: jax.Array, factor: jax.Array) -> jax.Array:
        """The quotient."""
        return bits.divide(magnitudes, jnp.broadcast_to(factor, magnitudes.shape))
