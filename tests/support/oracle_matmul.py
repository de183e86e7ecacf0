"""Operands of grouped matmuls, and their products in float64."""

import jax.numpy as jnp
import numpy as np

H, N = 72, 40
# Relative to the sum of the products' magnitudes: half an ulp of the result, and float32 sums; or
# bfloat16, and sums of products of e4m3 on tensor cores.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-18, "e4m3": 3 * 2**-9}


def make_operands(sizes, dtype="bfloat16", transposed=False, spare=5, h=H, n=N):
    """Rows, weights and offsets; NaN in the rows that are not in use."""
    rng = np.random.default_rng(sum(sizes))
    offsets = np.cumsum([0, *sizes]).astype(np.uint32)
    rows = rng.standard_normal((offsets[-1] + spare, h), np.float32)
    rows[offsets[-1] :] = np.nan
    weights = rng.standard_normal((len(sizes), *((n, h) if transposed else (h, n))), np.float32)
    dtype = np.dtype(dtype)
    return jnp.asarray(rows.astype(dtype)), jnp.asarray(weights.astype(dtype)), offsets


def reference(rows, weights, offsets, transposed=False):
    """The product of the rows in use and the sums of the products' magnitudes, in float64."""
    rows, weights = np.asarray(rows, np.float64), np.asarray(weights, np.float64)
    if transposed:
        weights = weights.swapaxes(1, 2)
    blocks = [
        (rows[first:end] @ matrix, abs(rows[first:end]) @ abs(matrix))
        for first, end, matrix in zip(offsets[:-1], offsets[1:], weights, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def accumulated(lhs, rhs, offsets, accumulator):
    """Per group, the accumulator plus the product of rows by rows, and the sum of magnitudes."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    sums = np.asarray(accumulator).astype(np.float64)
    magnitudes = abs(sums)
    for group, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        left, right = lhs[first:end].T, rhs[first:end]
        sums[group] += left @ right
        magnitudes[group] += abs(left) @ abs(right)
    return sums, magnitudes


def assert_close(got, wanted, magnitudes, dtype) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == wanted.shape
    error = abs(got - wanted) / np.maximum(magnitudes, 1e-30)
    assert error.size == 0 or error.max() <= TOLERANCE[dtype]


SIZES = {
    "mixed": [3, 0, 140, 64, 1],
    "one group": [33],
    "one row": [0, 0, 1, 0],
    "empty": [0, 0, 0],
    "many groups": [i % 7 for i in range(70)],
}
