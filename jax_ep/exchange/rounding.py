"""Roundings that XLA does not leave out.

It may leave out the conversion of a number to a smaller dtype and back, also where the caller's
code has computed an operand in the same program, but not `reduce_precision`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.formats.plain import sum_dtype


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
