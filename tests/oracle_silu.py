"""What fused_silu computes before it rounds to a format, in plain NumPy: every bit.

Written from docs/formats.md alone. float32 here is IEEE's: an operation rounds once,
subnormals are kept; `fma` is one operation.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
F64 = np.float64

LOG2_E = F32(float.fromhex("0x1.715476p+0"))
LN2 = F32(float.fromhex("0x1.62e430p-1"))
LN2_EXCESS = F32(float.fromhex("0x1.05c610p-29"))
# Of e^r, the highest power first.
COEFFICIENTS = [
    F32(float.fromhex(digits))
    for digits in (
        "0x1.6a2352p-10",
        "0x1.123a6cp-7",
        "0x1.5558f4p-5",
        "0x1.55549p-3",
        "0x1.fffffcp-2",
        "0x1p+0",
        "0x1p+0",
    )
]
FARTHEST, NEAR = F32(87), F32(16)


def fma(a, b, c) -> np.ndarray:
    """Gives a * b + c rounded once, of finite numbers.

    The product is exact in float64. The sum is rounded to odd there: so that what is
    cut off still counts when it is rounded to float32.
    """
    shape = np.broadcast(a, b, c).shape
    product, addend = F64(a) * F64(b), np.broadcast_to(F64(c), shape)
    total = product + addend
    head = total - product
    error = (product - (total - head)) + (addend - head)
    bits = np.ascontiguousarray(total).view(np.int64)
    is_inexact = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    # The neighbour in the direction of the error: of the two, the odd one.
    away = (error > 0) == (total > 0)
    odd = (bits + np.where(away, 1, -1)).view(F64)
    return np.where(is_inexact, odd, total).astype(F32)


def times_sigmoid(gate, z) -> np.ndarray:
    """Gives gate / (1 + e^-z), of finite float32 numbers."""
    clamped = np.clip(z, -FARTHEST, FARTHEST)
    n = np.rint(F64(clamped) * F64(-LOG2_E)).astype(F32)
    is_far = np.abs(z) > NEAR
    r = fma(n, LN2_EXCESS, fma(n, -LN2, -clamped))
    exp_r = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        exp_r = fma(exp_r, r, coefficient)
    power = np.ldexp(F32(1), n.astype(np.int32)).astype(F32)
    total = fma(exp_r, power, F32(1))
    reciprocal = F32(1) / total
    quotient = gate * reciprocal
    excess = fma(total, quotient, -gate)
    lost = F32(1) - (total - exp_r * power)
    excess = np.where(is_far, fma(lost, quotient, excess), excess)
    result = fma(-excess, reciprocal, quotient)
    result = np.where(z < -FARTHEST, F32(-0.0), result)
    return np.where(z > FARTHEST, gate, result)


def activate(x, interleaved=False, clamp=None) -> np.ndarray:
    """Gives float32[C, F] of [C, 2 F]: silu(gate) * up, or its clamped variant."""
    x, half = np.asarray(x).astype(F32), x.shape[1] // 2
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    with np.errstate(all="ignore"):
        if clamp is None:
            return times_sigmoid(gate, gate) * up
        alpha, limit = map(F32, clamp)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return times_sigmoid(gate, alpha * gate) * (up + F32(1))
