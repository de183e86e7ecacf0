"""Matmuls of e4m3 codes and their gradients, in plain NumPy.

Blocks of 128 share a scale, as in docs/formats.md. The products of a block are summed exactly; the
sums are scaled and added in float32. Codes are bytes.
"""

import jax
import numpy as np

import oracle_formats
import oracle_matmul

BLOCK = 128
F32 = np.float32
# As many groups as no kernel for rows by weights takes, and groups that do not fill blocks.
LARGE = {"large": [1000, 0, 2100, 1, 1100, 128], "many groups": [i * 37 % 150 for i in range(600)]}


def as_bytes(codes) -> np.ndarray:
    return np.asarray(codes).view(np.uint8)


def numbers(codes) -> np.ndarray:
    """float64 of codes as bytes or as e4m3."""
    return np.asarray(codes).view(oracle_formats.E4M3).astype(np.float64)


def quantize(x) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., n] and scales [..., n / 128] of bfloat16 or float32 numbers [..., n].

    As in `BlockwiseFP8`, but with scales of at least 2^-80 / 448.
    """
    x = np.asarray(x).astype(F32)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    is_dead = ~np.isfinite(blocks).all(-1)
    largest = oracle_formats.LARGEST["blockwise_fp8"]
    blocks = np.clip(np.where(is_dead[..., None], F32(0), blocks), -largest, largest)
    scales = np.maximum(np.abs(blocks).max(-1), F32(2**-80)) / F32(448)
    codes = np.clip(blocks / scales[..., None], F32(-448), F32(448)).astype(oracle_formats.E4M3)
    return codes.view(np.uint8).reshape(x.shape), scales


def dequantize(codes, scales) -> np.ndarray:
    """float32 [..., n] of codes [..., n] and scales [..., n / 128]."""
    by_element = np.repeat(np.asarray(scales, F32), BLOCK, -1)
    return numbers(codes).astype(F32) * by_element


def blocks_of(offsets) -> list[tuple[int, int, int]]:
    """The group, first row and end of each block of at most 128 rows of a group."""
    return [
        (group, row, min(row + BLOCK, int(end)))
        for group, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
        for row in range(int(first), int(end), BLOCK)
    ]


def quantize_columns(x, offsets) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, 128 B] and scales [B, n] of the B blocks of rows of [C, n], filled with zeros."""
    found = blocks_of(offsets)
    padded = np.zeros((len(found), BLOCK, x.shape[1]), np.asarray(x).dtype)
    for block, (_, first, end) in zip(padded, found, strict=True):
        block[: end - first] = x[first:end]
    codes, scales = quantize(padded.reshape(-1, x.shape[1]).T)
    return codes, scales.T


def multiply_columns(lhs, rhs, offsets) -> tuple[np.ndarray, np.ndarray]:
    """float32 [L, k, n]: per group, the sum over its rows; and the sums of magnitudes.

    lhs, rhs: codes and scales as `quantize_columns` gives them.
    """
    (a, of_a), (b, of_b) = lhs, rhs
    a, b = numbers(a), numbers(b)
    sums = np.zeros((len(offsets) - 1, len(a), len(b)), F32)
    magnitudes = np.zeros(sums.shape)
    for i, (group, *_) in enumerate(blocks_of(offsets)):
        one = slice(i * BLOCK, (i + 1) * BLOCK)
        scales = np.outer(of_a[i], of_b[i])
        sums[group] += (a[:, one] @ b[:, one].T).astype(F32) * scales
        magnitudes[group] += abs(a[:, one]) @ abs(b[:, one]).T * scales
    return sums, magnitudes


def assert_close(got, wanted, magnitudes, dtype) -> None:
    """Tensor cores keep 13 fractional bits of the largest product of those that they add up."""
    on_gpu = jax.default_backend() == "gpu"
    oracle_matmul.assert_close(got, wanted, magnitudes, "e4m3" if on_gpu else dtype)


def multiply_rows(rows, weights, offsets) -> tuple[np.ndarray, np.ndarray]:
    """float32 [C, n]: each row times the weights of its group; and the sums of magnitudes.

    rows: codes [C, k], scales [C, k / 128]; weights: [L, n, k], [L, ceil(n / 128), k / 128].
    """
    (a, of_a), (b, of_b) = rows, weights
    a, b, of_b = numbers(a), numbers(b), np.repeat(np.asarray(of_b), BLOCK, 1)[:, : b.shape[1]]
    sums = np.zeros((len(a), b.shape[1]), F32)
    magnitudes = np.zeros(sums.shape)
    for group, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        for i in range(a.shape[1] // BLOCK):
            one = slice(i * BLOCK, (i + 1) * BLOCK)
            left, right = a[first:end, one], b[group][:, one].T
            scales = np.outer(of_a[first:end, i], of_b[group][:, i])
            sums[first:end] += (left @ right).astype(F32) * scales
            magnitudes[first:end] += abs(left) @ abs(right) * scales
    return sums, magnitudes
