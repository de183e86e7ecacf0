"""Gradients of matmuls of codes, in FP8, against the same sums in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle_fp8
from gated_matmuls import MATMUL, VARIANTS, count_calls
from jax_ep.layer.expert_weights import ExpertWeights
from jax_ep.layer.matmul.api import multiply_scaled
from jax_ep.layer.matmul.columns import multiply_columns
from jax_ep.layer.matmul.gated_scaled import scaled_mlp
from jax_ep.layer.matmul.quantize_rows import Codes, quantize_rows
from oracle_fp8 import LARGE, as_bytes, assert_close

H, N = 256, 384
QUANTIZE, COLUMNS = "jax_ep_quantize_rows", "jax_ep_scaled_matmul_grad"
SIZES = {"mixed": [5, 0, 128, 1, 129], "one row": [0, 1], "none": [0, 0]}


def make_operands(sizes, spare=6, first=0):
    """Codes of rows, the tokens that they encode, weights, a cotangent and offsets. NaN where rows
    are not in use."""
    rng = np.random.default_rng(len(sizes) + sum(sizes))
    offsets = np.cumsum([first, *sizes]).astype(np.uint32)
    n_rows = int(offsets[-1]) + spare
    tokens, cotangent = (
        jnp.asarray(rng.standard_normal((n_rows, n)), jnp.bfloat16) for n in (H, N)
    )
    codes, scales = jax_ep.BlockwiseFP8().quantize(tokens)
    unused = (np.arange(n_rows) < first) | (np.arange(n_rows) >= offsets[-1])
    unused = unused[:, None]
    codes, scales = jnp.where(unused, jnp.nan, codes), jnp.where(unused, jnp.nan, scales)
    rows = jax_ep.QuantizedRows(codes.astype(jnp.float8_e4m3fn), scales.T, None)
    weights = jnp.asarray(rng.standard_normal((len(sizes), H, N)), jnp.float32)
    return rows, tokens, weights, jnp.where(unused, jnp.nan, cotangent), offsets


@functools.partial(jax.jit, static_argnames=("fp8", "transposed"))
def gradients(rows, tokens, weights, cotangent, offsets, fp8=True, transposed=False):
    """Of the tokens and of the weights, `[L, H, N]`."""

    def product(tokens, weights):
        given = weights.swapaxes(1, 2) if transposed else weights
        options = {"transposed": transposed, "fp8_gradients": fp8}
        return multiply_scaled(
            rows, jax_ep.quantize_weights(given, **options), offsets, source_rows=tokens
        )

    return jax.vjp(product, tokens, weights)[1](cotangent)


def gradient_of_rows(weights, cotangent, offsets):
    quantized = jax_ep.quantize_weights(weights)
    codes = np.asarray(quantized.codes).swapaxes(1, 2)
    of_weights = codes, np.asarray(quantized.scales).swapaxes(1, 2)
    return oracle_fp8.multiply_rows(oracle_fp8.quantize(cotangent), of_weights, offsets)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("name", SIZES)
def test_the_gradient_of_rows_is_a_product_of_codes(name, transposed):
    operands = make_operands(SIZES[name], first=3)
    *_, weights, cotangent, offsets = operands
    of_rows, _ = gradients(*operands, transposed=transposed)
    used = slice(offsets[0], offsets[-1])
    wanted, magnitudes = gradient_of_rows(weights, cotangent, offsets)
    assert of_rows.dtype == jnp.bfloat16
    assert_close(of_rows[used], wanted[used], magnitudes[used], "bfloat16")
    assert not np.any(np.asarray(of_rows, np.float32)[: offsets[0]])
    assert not np.any(np.asarray(of_rows, np.float32)[offsets[-1] :])


def cosine(a, b):
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("size", [1, 1e-9])
def test_gradients_in_fp8_are_close_to_exact_ones(size):
    rows, tokens, weights, cotangent, offsets = make_operands([100, 300, 56])
    cotangent = (cotangent * size).astype(jnp.bfloat16)
    used = slice(0, offsets[-1])
    x, y, w = (np.asarray(a, np.float64) for a in (tokens[used], cotangent[used], weights))
    groups = list(zip(offsets[:-1], offsets[1:], w, strict=True))
    exact = (
        np.concatenate([y[first:end] @ matrix.T for first, end, matrix in groups]),
        np.stack([x[first:end].T @ y[first:end] for first, end, _ in groups]),
    )
    for fp8, least in ((True, 0.9990), (False, 0.9993)):
        of_rows, of_weights = gradients(rows, tokens, weights, cotangent, offsets, fp8=fp8)
        assert cosine(of_rows[used], exact[0]) > least
        assert cosine(of_weights, exact[1]) > least


def experts(activation, fp8, rows, tokens, gate_up, down, bias, offsets):
    quantize = functools.partial(jax_ep.quantize_weights, fp8_gradients=fp8)
    weights = ExpertWeights(quantize(gate_up), quantize(down, transposed=True), bias, None)
    return scaled_mlp(activation, rows, tokens, weights, offsets)


def make_experts(sizes=(5, 0, 140), f=128):
    rows, tokens, _, _, offsets = make_operands(list(sizes))
    keys = jax.random.split(jax.random.key(1), 3)
    gate_up = jax.random.normal(keys[0], (len(sizes), H, 2 * f), jnp.bfloat16) * H**-0.5
    down = jax.random.normal(keys[1], (len(sizes), H, f), jnp.float32) * f**-0.5
    bias = jax.random.normal(keys[2], (len(sizes), 2 * f), jnp.bfloat16)
    return rows, tokens, gate_up, down, bias, offsets


def experts_and_gradients(wrap, activation, fp8, rows, *operands):
    *arrays, offsets = operands

    def run(*arrays):
        function = wrap(functools.partial(experts, activation, fp8))
        results, pull = jax.vjp(lambda *x: function(rows, *x, offsets), *arrays)
        return results[: offsets[-1]], pull(jnp.cos(results))

    return jax.jit(run)(*arrays)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", "interleaved, clamped"])
def test_experts_have_gradients_in_fp8(name):
    """Close to those in bfloat16, after a forward of the same bits, with and without remat."""
    operands = make_experts()

    def run(fp8, wrap=lambda function: function):
        return experts_and_gradients(wrap, VARIANTS[name], fp8, *operands)

    (results, grads), (wanted, wide) = run(True), run(False)
    np.testing.assert_array_equal(results, wanted)
    n_used = int(operands[-1][-1])
    for got, other in zip(grads, wide, strict=True):
        assert got.dtype == other.dtype and not np.array_equal(got[:n_used], other[:n_used])
    pairs = [(grads[0][:n_used], wide[0][:n_used]), *zip(grads[1:], wide[1:], strict=True)]
    assert all(cosine(*pair) > 0.998 for pair in pairs)
    everything = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable
    )
    for wrap in (jax.checkpoint, everything):
        again = run(True, wrap)
        assert cosine(again[1][1], grads[1]) > 0.99999


@pytest.mark.parametrize("in_fp8", [True, False])
def test_a_gradient_keeps_only_what_it_reads(in_fp8):
    rows, tokens, weights, _, offsets = make_operands([5, 9])

    def kept(*names):
        def residuals(tokens, weights):
            quantized = jax_ep.quantize_weights(weights, fp8_gradients=in_fp8)

            def product(tokens, source):
                source_rows = tokens if "tokens" in names else None
                given = dataclasses.replace(quantized, source=None)
                if "weights" in names:
                    given = dataclasses.replace(quantized, source=source)
                return multiply_scaled(rows, given, offsets, source_rows)

            return jax.vjp(product, tokens, weights)[1]

        found = jax.tree.leaves(jax.eval_shape(residuals, tokens, weights))
        large = [x for x in found if x.size > 999]  # no scales
        return {(x.shape, x.dtype.name) for x in large}

    row_codes, codes = (rows.tokens.shape, "uint8"), (weights.shape, "uint8")
    own = (weights.shape, weights.dtype.name)
    transposed = ((weights.shape[0], *weights.shape[:0:-1]), "uint8")
    of_weights = {codes} if in_fp8 else {own}
    assert kept("tokens", "weights") == {row_codes} | of_weights
    assert kept("weights") == {row_codes}
    assert kept("tokens") == ({codes} if in_fp8 else {transposed})


def column_codes(sizes):
    _, tokens, weights, cotangent, offsets = make_operands(sizes, first=3)
    quantize = jax.jit(functools.partial(quantize_rows, along_columns=True))
    both = [quantize(x, offsets).along_columns for x in (tokens, cotangent)]
    return both, offsets, weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SIZES)
def test_products_of_columns_are_promoted_sums(name, dtype):
    both, offsets, weights = column_codes(SIZES[name])
    wanted, magnitudes = oracle_fp8.multiply_columns(*both, offsets)
    product = jax.jit(functools.partial(multiply_columns, dtype))(*both, offsets)
    assert product.dtype == dtype
    assert_close(product, wanted, magnitudes, dtype)
    if dtype == "float32":
        sums = jax.jit(functools.partial(multiply_columns, dtype))(*both, offsets, weights)
        assert_close(sums, wanted + weights, magnitudes + abs(weights), dtype)
        for group, size in enumerate(SIZES[name]):
            assert size or np.array_equal(sums[group], weights[group])


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_the_gradient_of_weights_is_a_product_of_codes(transposed):
    operands = make_operands(SIZES["mixed"], first=3)
    rows, *_, cotangent, offsets = operands
    _, of_weights = gradients(*operands, transposed=transposed)
    numbers = oracle_fp8.dequantize(as_bytes(rows.tokens), np.asarray(rows.scales).T)
    codes = (oracle_fp8.quantize_columns(x, offsets) for x in (numbers, cotangent))
    wanted, magnitudes = oracle_fp8.multiply_columns(*codes, offsets)
    assert of_weights.dtype == jnp.float32
    assert_close(of_weights, wanted, magnitudes, "float32")


@pytest.mark.parametrize("layout", ["transposed", "row_major"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_sums_of_gradients_are_of_products_of_codes(transposed, layout):
    """Those of `fp8_gradients`, added in one addition."""
    operands = make_operands(SIZES["mixed"], first=3)
    rows, _, sums, cotangent, offsets = operands
    _, of_weights = gradients(*operands, transposed=transposed)
    token_format = jax_ep.BlockwiseFP8(layout)
    if layout == "row_major":
        rows = rows._replace(scales=rows.scales.T)
    given = sums.swapaxes(1, 2) if transposed else sums
    options = {"transposed": transposed, "token_format": token_format}
    add = jax.jit(functools.partial(jax_ep.grouped_matmul_gradient, **options))
    got = add(rows, cotangent, offsets, given)
    got = got.swapaxes(1, 2) if transposed else got
    np.testing.assert_array_equal(got, sums + of_weights)


def test_errors_of_sums_of_gradients_name_what_must_hold():
    rows, _, sums, cotangent, offsets = make_operands([3, 2])

    def add(rows=rows, cotangent=cotangent, sums=sums, **options):
        jax_ep.grouped_matmul_gradient(rows, cotangent, offsets, sums, **options)

    with pytest.raises(ValueError, match=r"accumulator must have the shape \[L=2, N=384, H=256\]"):
        add(transposed=True)
    with pytest.raises(ValueError, match="token_format must be BlockwiseFP8"):
        add(token_format=jax_ep.MXFP8())
    with pytest.raises(ValueError, match="cotangent must be bfloat16"):
        add(cotangent=cotangent.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"rows.scales must have the shape \[H/128=2, C=11\]"):
        add(rows=rows._replace(scales=rows.scales.T))
    with pytest.raises(ValueError, match="N must be a multiple of 128 with codes"):
        add(cotangent=cotangent[:, :200], sums=sums[..., :200])
    with pytest.raises(ValueError, match="token_format must be None unless rows are codes"):
        add(rows=jnp.ones((11, 256)), token_format=jax_ep.BlockwiseFP8())
    with pytest.raises(NotImplementedError, match="a sum of products of codes has no derivative"):
        jax.grad(lambda x: jnp.sum(jax_ep.grouped_matmul_gradient(rows, x, offsets, sums)))(
            cotangent
        )


def test_only_gradients_that_are_asked_for_are_computed(monkeypatch):
    rows, tokens, weights, cotangent, offsets = make_operands([140, 9])

    arrays = {"tokens": tokens, "weights": weights}

    def differentiated(*names):
        def product(given):
            given = arrays | given
            options = {"differentiable": "weights" in names, "fp8_gradients": True}
            quantized = jax_ep.quantize_weights(given["weights"], **options)
            source = given["tokens"] if "tokens" in names else None
            return multiply_scaled(rows, quantized, offsets, source)

        return lambda given: jax.vjp(product, given)[1](cotangent)

    wanted = {
        ("tokens",): {MATMUL: 1, QUANTIZE: 1},
        ("weights",): {QUANTIZE: 2, COLUMNS: 1},
        ("tokens", "weights"): {MATMUL: 1, QUANTIZE: 2, COLUMNS: 1},
    }
    for names, calls in wanted.items():
        given = {name: arrays[name] for name in names}
        assert count_calls(monkeypatch, differentiated(*names), given) == calls


@pytest.mark.thorough
def test_weights_quantized_once_serve_microbatches():
    """In a loop and in a vmap."""
    rows, tokens, weights, cotangent, offsets = make_operands([5, 0, 140])
    cotangents = jnp.stack([cotangent, -3 * cotangent])

    @functools.partial(jax.jit, static_argnums=0)
    def run(step, tokens, weights):
        quantized = jax_ep.quantize_weights(weights, differentiable=False, fp8_gradients=True)

        def gradients(cotangent):
            def product(tokens, weights):
                given = dataclasses.replace(quantized, source=weights)
                return multiply_scaled(rows, given, offsets, tokens)

            return jax.vjp(product, tokens, weights)[1](cotangent)

        return step(gradients)

    def unrolled(gradients):
        each = map(gradients, cotangents)
        return jax.tree.map(lambda *x: jnp.stack(x), *each)

    wanted = run(unrolled, tokens, weights)
    for step in (lambda f: jax.lax.map(f, cotangents), lambda f: jax.vmap(f)(cotangents)):
        jax.tree.map(np.testing.assert_array_equal, run(step, tokens, weights), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "accumulated"])
@pytest.mark.parametrize(("k", "n"), [(384, 768), (8, 264), (520, 136)])
@pytest.mark.parametrize("name", LARGE)
def test_kernels_give_promoted_sums(name, k, n, dtype):
    """Of matrices that do not fill tiles, too, with the same bits in every run."""
    offsets = np.cumsum([5, *LARGE[name]]).astype(np.uint32)
    rows = jax.random.normal(jax.random.key(4), (int(offsets[-1]) + 9, 1408), jnp.bfloat16)
    codes, scales = jax.jit(functools.partial(quantize_rows, along_columns=True))(
        rows, offsets
    ).along_columns
    lhs, rhs = Codes(codes[:k], scales[:, :k]), Codes(codes[-n:], scales[:, -n:])
    accumulates = dtype == "accumulated"
    dtype = "float32" if accumulates else dtype
    others = [jnp.full((len(LARGE[name]), k, n), 0.5, dtype)] * accumulates
    run = jax.jit(functools.partial(multiply_columns, dtype))
    got = run(lhs, rhs, offsets, *others)
    wanted, magnitudes = oracle_fp8.multiply_columns(lhs, rhs, offsets)
    assert_close(got, wanted + 0.5 * accumulates, magnitudes + 0.5 * accumulates, dtype)
    np.testing.assert_array_equal(run(lhs, rhs, offsets, *others), got)
