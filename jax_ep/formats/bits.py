"""float32 arithmetic and conversions on bit patterns.

Compilers flush subnormal numbers (XLA:CPU), approximate division (XLA:GPU) and rewrite division by
constants, but leave integers alone: results here are bit-exact IEEE 754 on every platform. All
operands and results are uint32 bit patterns of nonnegative numbers, none of them NaN; overflow
gives infinity.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INFINITY = 0x7F800000
SIGN = 0x80000000
_IMPLICIT_BIT = 1 << 23
_N_EXTRA = 3  # guard bits that a significand keeps below those of the result


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of numbers of any dtype, as unsigned integers of their size."""
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of numbers, along a last axis unless each takes one; of small ones, one each."""
    width = _n_bits(x.dtype)
    if width >= 8:
        return lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(x, getattr(jnp, f"uint{width}")).astype(jnp.uint8)


def from_bytes(data: jax.Array, dtype: Any) -> jax.Array:
    """The numbers of `to_bytes`."""
    width = _n_bits(dtype)
    if width < 8:
        data = data.astype(getattr(jnp, f"uint{width}"))
    return lax.bitcast_convert_type(data, dtype)


def _n_bits(dtype: Any) -> int:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return int((jnp.iinfo if is_integer else jnp.finfo)(dtype).bits)


def to_bits(x: jax.Array) -> jax.Array:
    """The patterns of bfloat16 or float32 numbers as float32."""
    if x.dtype == jnp.bfloat16:
        return _u32(lax.bitcast_convert_type(x, jnp.uint16)) << 16
    return lax.bitcast_convert_type(x, jnp.uint32)


def to_float(bits: jax.Array) -> jax.Array:
    """The float32 numbers of patterns."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def constant(value: float) -> np.uint32:
    """The pattern of the float32 number nearest to `value`."""
    return np.float32(value).view(np.uint32)


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product, rounded to nearest even."""
    exponent_a, a = _unpack(a)
    exponent_b, b = _unpack(b)
    # The 24 x 24-bit product, from 12-bit halves.
    a_high, a_low, b_high, b_low = a >> 12, a & 0xFFF, b >> 12, b & 0xFFF
    low = a_low * b_low
    middle = a_high * b_low + a_low * b_high + (low >> 12)
    high = a_high * b_high + (middle >> 12)
    low = (middle & 0xFFF) << 12 | low & 0xFFF
    significand = high << 4 | low >> 20
    sticky = _u32((low & 0xFFFFF) != 0)
    return _round(exponent_a + exponent_b - 127, significand | sticky)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """The quotient, rounded to nearest even; `b` is not zero."""
    exponent_a, a = _unpack(a)
    exponent_b, b = _unpack(b)
    quotient, rest = a // b, a % b
    for n_bits in (8, 8, 8, 2):
        rest = rest << n_bits
        quotient, rest = quotient << n_bits | rest // b, rest % b
    sticky = _u32(rest != 0)
    return _round(exponent_a - exponent_b + 127, quotient | sticky)


def reciprocal(b: jax.Array) -> jax.Array:
    """`1 / b`; infinity for zero, zero for infinity."""
    one = jnp.full_like(b, constant(1))
    result = divide(one, jnp.where(b == 0, one, b))
    result = jnp.where(b == 0, np.uint32(INFINITY), result)
    return jnp.where(b == INFINITY, np.uint32(0), result)


def to_e4m3(bits: jax.Array) -> jax.Array:
    """The nearest e4m3fn code, ties to even, at most 448; uint32."""
    normal = _round_off(bits, 20) - np.uint32((127 - 7) << 3)
    subnormal = _units(bits, 2.0**14)  # of 2^-9
    code = jnp.where(bits < constant(2.0**-6), subnormal, normal)
    return jnp.minimum(code, np.uint32(0x7E))


def to_e2m1(bits: jax.Array) -> jax.Array:
    """The nearest e2m1 code, ties to even, at most 6; uint32."""
    normal = _round_off(bits, 22) - np.uint32((127 - 1) << 1)
    subnormal = _units(bits, 2.0**22)  # of 0.5
    code = jnp.where(bits < constant(1), subnormal, normal)
    return jnp.minimum(code, np.uint32(7))


def _u32(x: jax.Array | int) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _unpack(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 e and uint32 s with value s * 2^(e - 150), s in [2^23, 2^24) or zero."""
    exponent = (bits >> 23).astype(jnp.int32)
    fraction = bits & np.uint32(_IMPLICIT_BIT - 1)
    shift = lax.clz(fraction) - np.uint32(8)
    is_normal = exponent > 0
    significand = jnp.where(
        is_normal, fraction | np.uint32(_IMPLICIT_BIT), fraction << (shift & 31)
    )
    return (
        jnp.where(is_normal, exponent, 1 - shift.astype(jnp.int32)),
        jnp.where(bits == 0, np.uint32(0), significand),
    )


def _round(exponent: jax.Array, significand: jax.Array) -> jax.Array:
    """The pattern of significand * 2^(exponent - 127 - 26), nearest even.

    The significand is below 2^28, at least 2^25 unless zero, and its last bit sticky.
    """
    length = 32 - lax.clz(significand).astype(jnp.int32)
    excess = length - (24 + _N_EXTRA)  # -1, 0 or 1
    exponent = exponent + excess
    significand = jnp.where(excess > 0, significand >> 1 | significand & 1, significand) << (
        excess == -1
    ).astype(jnp.uint32)
    # Subnormal results keep fewer bits.
    shift = jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    lost = significand & ((np.uint32(1) << shift) - np.uint32(1))
    significand = significand >> shift | _u32(lost != 0)
    rounded = _round_off(significand, _N_EXTRA)
    biased = jnp.clip(exponent - 1, 0, 254).astype(jnp.uint32)
    bits = jnp.minimum((biased << 23) + rounded, np.uint32(INFINITY))
    return jnp.where(rounded == 0, np.uint32(0), bits)


def _round_off(bits: jax.Array, n_bits: int) -> jax.Array:
    """`bits / 2^n_bits`, nearest even."""
    half = np.uint32((1 << (n_bits - 1)) - 1)
    return (bits + half + (bits >> n_bits & 1)) >> n_bits


def _units(bits: jax.Array, large: float) -> jax.Array:
    """The number in units in the last place of `large`, nearest even."""
    total = to_float(bits) + np.float32(large)
    return to_bits(total) - constant(large)
