"""Rows as codes along rows and along columns, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle_fp8
from jax_ep.layer.matmul.columns import multiply_columns
from jax_ep.layer.matmul.quantize_rows import count_blocks, quantize_rows
from oracle_fp8 import LARGE, as_bytes

EDGES = [0, 1, 127, 0, 128, 129]


def edge_rows(first=3):
    """bfloat16 rows of groups of these sizes: blocks of zeros, of -0, with one infinity or NaN, of
    small, of tiny and of huge numbers; NaN in rows of no group."""
    offsets = np.cumsum([first, *EDGES]).astype(np.uint32)
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((int(offsets[-1]) + 5, 256), np.float32)
    rows[:, 0], rows[:, 1], rows[:, 2] = 0, -0.0, rows[:, 2] * 1e-30
    rows[:, 3] *= 1e38
    rows[:, 7:64] *= 1e-12
    rows[:, 128:] *= 1e-20
    rows[offsets[2], 4], rows[offsets[-2] + 7, 5], rows[offsets[-1] - 1, 6] = (
        np.inf,
        np.nan,
        -np.inf,
    )
    rows[: offsets[0]] = rows[offsets[-1] :] = np.nan
    return jnp.asarray(rows, jnp.bfloat16), offsets


@pytest.mark.parametrize("first", [0, 3])
def test_codes_along_rows_and_along_columns_match_numpy(first):
    rows, offsets = edge_rows(first)
    run = jax.jit(functools.partial(quantize_rows, along_rows=True, along_columns=True))
    along_rows, along_columns = run(rows, offsets)
    used = slice(offsets[0], offsets[-1])
    codes, scales = oracle_fp8.quantize(rows[used])
    np.testing.assert_array_equal(as_bytes(along_rows.codes)[used], codes)
    np.testing.assert_array_equal(along_rows.scales[:, used], scales.T)
    check_columns(along_columns, oracle_fp8.quantize_columns(rows, offsets))


def check_columns(got, wanted):
    codes, scales = wanted
    np.testing.assert_array_equal(as_bytes(got.codes)[:, : codes.shape[1]], codes)
    np.testing.assert_array_equal(got.scales[: len(scales)], scales)


def test_codes_along_rows_are_quantized_again_along_columns():
    rows, offsets = edge_rows()
    codes, scales = map(np.asarray, jax_ep.BlockwiseFP8().quantize(rows))
    numbers = oracle_fp8.dequantize(codes, scales)
    unused = np.arange(len(codes)) >= offsets[-1]
    codes = jnp.where(unused[:, None], jnp.nan, codes).astype(codes.dtype)
    scales = jnp.where(unused, jnp.nan, jnp.asarray(scales.T))
    got = jax.jit(functools.partial(quantize_rows, along_columns=True))(codes, offsets, scales)
    assert got.along_rows is None
    check_columns(got.along_columns, oracle_fp8.quantize_columns(numbers, offsets))


@pytest.mark.parametrize("n_rows", [0, 4])
def test_no_rows_have_no_codes(n_rows):
    rows, offsets = jnp.full((n_rows, 128), jnp.nan, jnp.bfloat16), np.zeros(3, np.uint32)
    codes = quantize_rows(rows, offsets, along_rows=True, along_columns=True)
    assert codes.along_rows.codes.shape == (n_rows, 128)
    assert codes.along_columns.scales.shape == (count_blocks(n_rows, 2), 128)
    product = multiply_columns(jnp.bfloat16, *[codes.along_columns] * 2, offsets)
    assert product.shape == (2, 128, 128) and not np.any(product)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("are_codes", [False, True], ids=["numbers", "codes"])
def test_kernels_give_the_codes_of_numpy(are_codes, name):
    """In an odd number of tiles, and in every run."""
    offsets = np.cumsum([5, *LARGE[name]]).astype(np.uint32)
    keys = jax.random.split(jax.random.key(3), 2)
    shape = int(offsets[-1]) + 9, 128 * 9
    rows = jax.random.normal(keys[0], shape) * jnp.exp(6 * jax.random.normal(keys[1], shape[1:]))
    rows = rows.astype(jnp.bfloat16).at[700, 600].set(jnp.nan).at[701, 601].set(-jnp.inf)
    operands = rows.at[: offsets[0]].set(jnp.nan), offsets
    if are_codes:
        codes, scales = jax_ep.BlockwiseFP8().quantize(rows)
        rows = oracle_fp8.dequantize(*map(np.asarray, (codes, scales)))
        operands = codes, offsets, scales.T
    run = jax.jit(functools.partial(quantize_rows, along_rows=not are_codes, along_columns=True))
    along_rows, along_columns = run(*operands)
    check_columns(along_columns, oracle_fp8.quantize_columns(rows, offsets))
    if not are_codes:
        codes, scales = oracle_fp8.quantize(rows)
        used = slice(offsets[0], offsets[-1])
        np.testing.assert_array_equal(as_bytes(along_rows.codes)[used], codes[used])
        np.testing.assert_array_equal(along_rows.scales[:, used], scales[used].T)
