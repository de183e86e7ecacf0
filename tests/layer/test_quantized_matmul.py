"""quantize_weights, and grouped_matmul of codes against matmuls in float64, with gradients."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep
from oracle_matmul import assert_close, make_operands, reference


def numpy_blocks(weights):
    """Codes and scales of `[L, N, H]` by NumPy."""
    n_groups, n, h = weights.shape
    padded = np.zeros((n_groups, -(-n // 128) * 128, h), np.float32)
    padded[:, :n] = weights.astype(np.float32)
    blocks = padded.reshape(n_groups, -1, 128, h // 128, 128)
    scales = np.maximum(abs(blocks).max(axis=(2, 4)), np.float32(1e-4)) / np.float32(448)
    codes = (blocks / scales[:, :, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(padded.shape)[:, :n], scales


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [128, 200, 16])
def test_quantized_weights_match_numpy(n, dtype):
    weights = np.random.default_rng(2).standard_normal((3, n, 256), np.float32)
    weights[1, :, :128] = 0
    weights = weights.astype(dtype)
    codes, scales = numpy_blocks(weights)
    for transposed in (True, False):
        given = weights if transposed else weights.swapaxes(1, 2)
        got = jax.jit(functools.partial(jax_ep.quantize_weights, transposed=transposed))(given)
        np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8), codes.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(got.scales), scales)
        assert got.transposed == transposed and got.source.shape == given.shape
    assert jax_ep.quantize_weights(weights, transposed=True, differentiable=False).source is None


def quantized_operands(layout="transposed", n=200, h=256):
    """Codes of rows and weights, the offsets, and the numbers that the codes stand for."""
    rows, weights, offsets = make_operands([4, 0, 140, 64], h=h, n=n, transposed=True, spare=8)
    token_format = jax_ep.BlockwiseFP8(layout)
    codes, scales = token_format.quantize(jnp.nan_to_num(rows))
    scales = scales.at[offsets[-1] :].set(jnp.nan)
    values = token_format.dequantize(jax_ep.Quantized(codes, scales))
    laid_out = token_format.layout.place(scales, offsets)
    quantized = jax_ep.quantize_weights(weights, transposed=True)
    by_element = np.repeat(np.repeat(quantized.scales, 128, 1)[:, :n], 128, 2)
    numbers = np.asarray(quantized.codes, np.float64) * by_element
    return jax_ep.QuantizedRows(codes, laid_out, None), quantized, offsets, (values, numbers)


@pytest.mark.parametrize("n", [200, 16, 136])
@pytest.mark.parametrize("layout", ["transposed", "row_major"])
def test_products_of_codes_match_float64(layout, n):
    rows, weights, offsets, numbers = quantized_operands(layout, n)
    wanted, magnitudes = reference(*numbers, offsets, True)
    multiply = functools.partial(jax_ep.grouped_matmul, token_format=jax_ep.BlockwiseFP8(layout))
    got = jax.jit(multiply)(rows, weights, offsets)
    assert got.dtype == jnp.bfloat16
    assert_close(got[: offsets[-1]], wanted, magnitudes, "bfloat16")


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_gradients_of_codes_are_straight_through(transposed):
    rows, _, offsets, (values, _) = quantized_operands(n=128)
    weights = np.random.default_rng(3).standard_normal((4, 128, 256), np.float32)
    if not transposed:
        weights = weights.swapaxes(1, 2)

    def through_codes(weights):
        quantized = jax_ep.quantize_weights(weights, transposed=transposed)
        product = jax_ep.grouped_matmul(rows, quantized, offsets)
        return jnp.sum(product[: offsets[-1]].astype(jnp.float32))

    def through_numbers(weights):
        numbers = values.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)
        product = jax_ep.grouped_matmul(*numbers, offsets, transposed=transposed)
        return jnp.sum(product[: offsets[-1]].astype(jnp.float32))

    got, wanted = (jax.jit(jax.grad(f))(weights) for f in (through_codes, through_numbers))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, 0.01, 0.01)


def test_codes_have_no_second_derivative():
    rows, _, offsets, _ = quantized_operands(n=128)
    weights = np.random.default_rng(3).standard_normal((4, 128, 256), np.float32)

    def loss(weights):
        quantized = jax_ep.quantize_weights(weights, transposed=True)
        return jnp.sum(jax_ep.grouped_matmul(rows, quantized, offsets).astype(jnp.float32) ** 2)

    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda weights: jnp.sum(jax.grad(loss)(weights) ** 2))(weights)


@pytest.mark.parametrize("keeps", ["nothing", "everything"])
def test_codes_that_a_checkpoint_keeps_have_the_same_bits(keeps):
    """Also from 256 on, in e4m3."""
    policy = getattr(jax.checkpoint_policies, f"{keeps}_saveable")
    hidden, _, offsets = make_operands([4, 0, 60], h=256, n=8)
    weights = np.random.default_rng(3).standard_normal((3, 128, 64), np.float32)

    def results(weights, hidden):
        rows = jax_ep.fused_silu(hidden, offsets, jax_ep.BlockwiseFP8())
        return jax_ep.grouped_matmul(rows, jax_ep.quantize_weights(weights), offsets)

    def run(function):
        def both(weights, hidden):
            products, pull = jax.vjp(lambda weights: function(weights, hidden), weights)
            return products[: offsets[-1]], pull(products)[0]

        return jax.jit(both)(weights, hidden)

    wanted = run(results)
    assert not any(np.isnan(np.asarray(x, np.float32)).any() for x in wanted)
    got = run(jax.checkpoint(results, policy=policy))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_weights_without_elements_are_quantized():
    for shape in ((0, 128, 8), (2, 128, 0)):
        quantized = jax_ep.quantize_weights(jnp.zeros(shape))
        assert quantized.codes.shape == (shape[0], shape[2], 128)
        assert quantized.scales.shape == (shape[0], -(-shape[2] // 128), 1)


def test_codes_and_numbers_do_not_mix():
    rows, weights, offsets, _ = quantized_operands()
    numbers, matrices, few_offsets = make_operands([2, 4], h=16, n=8)
    with pytest.raises(TypeError, match="must both be arrays, or QuantizedRows and"):
        jax_ep.grouped_matmul(numbers, weights, few_offsets)
    with pytest.raises(TypeError, match="Quantize weights with quantize_weights"):
        jax_ep.grouped_matmul(rows, matrices, offsets)
    with pytest.raises(ValueError, match="token_format must be BlockwiseFP8"):
        jax_ep.grouped_matmul(rows, weights, offsets, token_format=jax_ep.MXFP8())
    with pytest.raises(ValueError, match="transposed must be False"):
        jax_ep.grouped_matmul(rows, weights, offsets, transposed=True)
    with pytest.raises(ValueError, match=r"rows.scales must have the shape \[C=216, H/128=2\]"):
        row_major = jax_ep.BlockwiseFP8("row_major")
        jax_ep.grouped_matmul(rows, weights, offsets, token_format=row_major)
    narrow = jax_ep.QuantizedRows(rows.tokens[:, :192], rows.scales[:1], None)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 128"):
        jax_ep.grouped_matmul(narrow, weights, offsets)
    with pytest.raises(ValueError, match="H must be a multiple of 128"):
        jax_ep.quantize_weights(matrices)
