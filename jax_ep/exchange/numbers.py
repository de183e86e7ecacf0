"""Numbers as they travel: roundings that XLA does not leave out, and integers as floats.

XLA may leave out the conversion of a number to a smaller dtype and back, also where the caller's
code has computed an operand in the same program, but not `reduce_precision`.

Values that are sent along a routing pass through arithmetic: kernels multiply them by 1, `jax.lax`
adds zeros. That would change bits that stand for a NaN, as those of the integer -1 do. Limbs of 16
bits are small whole numbers, which stay what they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.checks import VECTOR_BYTES
from jax_ep.formats.plain import sum_dtype

INTEGERS = (jnp.int32, jnp.uint32)
BYTES_PER_INTEGER = 8  # as limbs
_BITS, _MASK = 16, 0xFFFF


def in_float32(x: jax.Array) -> jax.Array:
    """The numbers of `x` as float32, rounded to the dtype of `x` however they were computed."""
    return round_to(x.astype(jnp.float32), x.dtype)


def round_to(numbers: jax.Array, dtype: Any) -> jax.Array:
    """float32 numbers, rounded to `dtype`."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=7)
    return _round_to_float16(numbers) if dtype == jnp.float16 else numbers


def to_sum_dtype(x: jax.Array) -> jax.Array:
    """Numbers to add or to send along a routing, in the dtype in which they travel: exact."""
    return x if sum_dtype(x.dtype) == x.dtype else in_float32(x)


def from_sum_dtype(sums: jax.Array, dtype: Any) -> jax.Array:
    """What has traveled for numbers of `dtype`, rounded to it."""
    return sums if sums.dtype == dtype else round_to(sums, dtype).astype(dtype)


@jax.custom_jvp
def _round_to_float16(x: jax.Array) -> jax.Array:
    """`reduce_precision` that keeps subnormals of float16, which are multiples of 2^-24."""
    steps = lax.round(x * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN)
    normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    return jnp.where(jnp.abs(x) < 2.0**-14, steps * 2.0**-24, normal)


@_round_to_float16.defjvp
def _round_to_float16_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _round_to_float16(*primals), tangents[0]


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
