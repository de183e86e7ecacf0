"""The results of fused_silu before it rounds to a format, in plain NumPy, to the last bit.

Written from docs/formats.md alone. float32 is IEEE's: each operation rounds once, subnormals are
kept; `fma` counts as one operation.
"""

import numpy as np

F32 = np.float32
F64 = np.float64

SCALE = F32(float.fromhex("0x1.71546ep+0"))
POWER_STEP = (1 << 23) + 2
# Coefficients of the polynomial in r, highest power first.
COEFFICIENTS = [
    F32(float.fromhex(digits))
    for digits in (
        "0x1.5bda2p-10",
        "0x1.3d049cp-7",
        "0x1.c6b74ap-5",
        "0x1.ebf94ap-3",
        "0x1.62e42ep-1",
        "0x1.fffffep-1",
    )
]
MAX_EXPONENT = F32(87)


def fma(a, b, c) -> np.ndarray:
    """a * b + c of finite numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd there, so that the lost bits still
    count when it is rounded to float32.
    """
    shape = np.broadcast(a, b, c).shape
    product, addend = F64(a) * F64(b), np.broadcast_to(F64(c), shape)
    total = product + addend
    head = total - product
    error = (product - (total - head)) + (addend - head)
    bits = np.ascontiguousarray(total).view(np.int64)
    is_inexact = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    # Where the last bit is 0, take the neighbor in the direction of the error: its last bit is 1.
    away = (error > 0) == (total > 0)
    odd = (bits + np.where(away, 1, -1)).view(F64)
    return np.where(is_inexact, odd, total).astype(F32)


def times_sigmoid(gate, z) -> np.ndarray:
    """gate / (1 + e^-z) of float32 numbers."""
    clamped = np.clip(z, -MAX_EXPONENT, MAX_EXPONENT)
    n = np.rint(F64(clamped) * F64(-SCALE)).astype(F32)
    r = fma(clamped, -SCALE, -n)
    exp_r = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        exp_r = fma(exp_r, r, coefficient)
    first = np.int32(0x3F800001)
    power = (first + n.astype(np.int32) * np.int32(POWER_STEP)).view(F32)
    reciprocal = F32(1) / fma(exp_r, power, F32(1))
    return gate * np.where(z < -MAX_EXPONENT, F32(0), reciprocal)


def activate(x, interleaved=False, clamp=None) -> np.ndarray:
    """float32[C, F] of [C, 2 F]: silu(gate) * up, or its clamped variant."""
    x, half = np.asarray(x).astype(F32), x.shape[1] // 2
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    with np.errstate(all="ignore"):
        if clamp is None:
            return times_sigmoid(gate, gate) * up
        alpha, limit = map(F32, clamp)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return times_sigmoid(gate, alpha * gate) * (up + F32(1))
