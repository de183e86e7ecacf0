"""32-bit integers as float32 numbers, which arrive bit by bit on every transport.

Values that are sent along a routing pass through arithmetic: kernels multiply them by 1, `jax.lax`
adds zeros. That would change bits that stand for a NaN, as those of -1 do. Limbs of 16 bits are
small whole numbers, which stay what they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.checks import VECTOR_BYTES

INTEGERS = (jnp.int32, jnp.uint32)
BYTES_PER_INTEGER = 8  # as limbs
_BITS, _MASK = 16, 0xFFFF


def is_integer(x: Any) -> bool:
    """Whether an array has one of the dtypes that are sent as limbs."""
    return x is not None and any(x.dtype == dtype for dtype in INTEGERS)


def to_limbs(integers: jax.Array) -> jax.Array:
    """`float32[..., V]` from `[..., W]`: the high limbs, the low ones, zeros that fill vectors."""
    bits = lax.bitcast_convert_type(lax.stop_gradient(integers), jnp.uint32)
    limbs = jnp.concatenate([bits >> _BITS, bits & _MASK], axis=-1).astype(jnp.float32)
    rest = -limbs.shape[-1] % (VECTOR_BYTES // limbs.dtype.itemsize)
    return jnp.pad(limbs, [*[(0, 0)] * (limbs.ndim - 1), (0, rest)])


def from_limbs(limbs: jax.Array, size: int, dtype: Any) -> jax.Array:
    """`[..., W]` of an integer dtype, for W = `size`."""
    whole = lax.stop_gradient(limbs).astype(jnp.uint32)
    bits = (whole[..., :size] << _BITS) | whole[..., size : 2 * size]
    return lax.bitcast_convert_type(bits, dtype)
