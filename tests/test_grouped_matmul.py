"""grouped_matmul and quantize_weights against matmuls in float64, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import AXIS, make_mesh
from jax_ep.xla_ffi import matmul as matmul_primitive

H, N = 72, 40
SIZES = {
    "mixed": [3, 0, 140, 64, 1],
    "one group": [33],
    "one row": [0, 0, 1, 0],
    "empty": [0, 0, 0],
    "many groups": [i % 7 for i in range(70)],
}
# Relative to the sum of the products' magnitudes: half an ulp of the result, and float32 sums.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-18}


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


def assert_close(got, wanted, magnitudes, dtype) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == wanted.shape
    error = abs(got - wanted) / np.maximum(magnitudes, 1e-30)
    assert error.size == 0 or error.max() <= TOLERANCE[dtype]


def run(rows, weights, offsets, **options):
    """Under jit, with float32 products."""
    multiply = functools.partial(jax_ep.grouped_matmul, **options)
    with jax.default_matmul_precision("float32"):
        return jax.jit(multiply)(rows, weights, offsets)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_match_float64(sizes, dtype, transposed):
    rows, weights, offsets = make_operands(sizes, dtype, transposed)
    wanted, magnitudes = reference(rows, weights, offsets, transposed)
    for out in {dtype, "float32"}:
        got = run(rows, weights, offsets, transposed=transposed, dtype=out)
        assert got.dtype == out and got.shape == (rows.shape[0], N)
        assert_close(got[: offsets[-1]], wanted, magnitudes, out)


@pytest.mark.parametrize("h, n", [(128, 264), (8, 8), (520, 1032), (9, 5), (1, 1)])
def test_matrices_of_any_shape(h, n):
    rows, weights, offsets = make_operands([17, 0, 130], h=h, n=n)
    wanted, magnitudes = reference(rows, weights, offsets)
    got = run(rows, weights, offsets)
    assert_close(got[: offsets[-1]], wanted, magnitudes, "bfloat16")


def test_two_runs_give_the_same_bits():
    rows, weights, offsets = make_operands([200, 3, 0, 77], spare=0)
    first, second = (np.asarray(run(rows, weights, offsets)) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


def test_arrays_without_elements():
    offsets = np.zeros(3, np.uint32)
    got = jax_ep.grouped_matmul(jnp.zeros((0, 8)), jnp.ones((2, 8, 4)), offsets)
    assert got.shape == (0, 4)

    def step(rows, _):
        return jax_ep.grouped_matmul(rows, jnp.ones((2, 8, 8)), offsets), None

    def loop(rows):
        return jax.lax.scan(step, rows, length=2)[0]

    mesh = make_mesh(1)
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    assert jax.eval_shape(mapped, jnp.zeros((0, 8))).shape == (0, 8)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_match_float64(sizes, dtype, transposed):
    rows, weights, offsets = make_operands(sizes, dtype, transposed)
    used = int(offsets[-1])
    cotangent = np.random.default_rng(1).standard_normal((rows.shape[0], N), np.float32)
    cotangent[used:] = np.nan
    cotangent = jnp.asarray(cotangent).astype(dtype)

    @jax.jit
    def gradients(rows, weights, cotangent):
        multiply = functools.partial(jax_ep.grouped_matmul, transposed=transposed)
        _, pull = jax.vjp(lambda *arrays: multiply(*arrays, offsets), rows, weights)
        return pull(cotangent)

    with jax.default_matmul_precision("float32"):
        grad_rows, grad_weights = gradients(rows, weights, cotangent)
    wanted, magnitudes = reference(cotangent, weights, offsets, not transposed)
    assert_close(grad_rows[:used], wanted, magnitudes, dtype)
    assert not np.asarray(grad_rows[used:]).any(), "rows that are not in use"
    for group, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        pair = [np.asarray(x[first:end], np.float64) for x in (rows, cotangent)]
        left, right = reversed(pair) if transposed else pair
        assert_close(grad_weights[group], left.T @ right, abs(left).T @ abs(right), dtype)
        assert end > first or not np.asarray(grad_weights[group]).any(), "an empty group"


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_derivatives_match_finite_differences(transposed):
    rows, weights, offsets = make_operands([3, 0, 5], "float32", transposed, spare=0, h=4, n=3)

    def f(rows, weights):
        product = jax_ep.grouped_matmul(rows, weights, offsets, transposed=transposed)
        return jnp.tanh(product)

    with jax.default_matmul_precision("float32"):
        jax.test_util.check_grads(f, (rows, weights), order=2, modes=["rev"], rtol=0.02, atol=0.02)


def test_scan_remat_and_vmap_agree_with_a_loop():
    rows, weights, offsets = make_operands([9, 0, 30], spare=3, h=40, n=40)
    stack = jnp.stack([weights, weights * 2, weights * 0.5]) * 0.1
    rows = jnp.nan_to_num(rows)

    def layer(rows, weights):
        return jnp.tanh(jax_ep.grouped_matmul(rows, weights, offsets)), None

    def loss_of(step):
        def loss(rows, stack):
            return jnp.sum(step(rows, stack)[: offsets[-1]].astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def in_loop(rows, stack):
        for weights in stack:
            rows, _ = layer(rows, weights)
        return rows

    wanted = loss_of(in_loop)(rows, stack)
    for body in (layer, jax.checkpoint(layer)):
        got = loss_of(lambda rows, stack, body=body: jax.lax.scan(body, rows, stack)[0])(
            rows, stack
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0.02, 0.02), got, wanted)
    mapped = jax.jit(jax.vmap(lambda weights: layer(rows, weights)[0]))(stack)
    for got, weights in zip(mapped, stack, strict=True):
        used = slice(0, int(offsets[-1]))
        np.testing.assert_array_equal(got[used], jax.jit(layer)(rows, weights)[0][used])


@pytest.mark.multigpu
@pytest.mark.parametrize("replicated", [False, True], ids=["own weights", "same weights"])
def test_every_device_multiplies_its_own_groups(replicated):
    check_shard_map(2, replicated)


def test_a_shard_map_over_virtual_devices():
    for replicated in (False, True):
        check_shard_map(min(4, len(jax.devices())), replicated)


def check_shard_map(n_ranks: int, replicated: bool) -> None:
    mesh = make_mesh(n_ranks)
    each = [
        make_operands([i, 5, 3 * i + 1][::-1], "float32", spare=40 - 4 * i) for i in range(n_ranks)
    ]
    height = min(len(rows) for rows, _, _ in each)
    rows = jnp.nan_to_num(jnp.concatenate([rows[:height] for rows, _, _ in each]))
    weights = each[0][1] if replicated else jnp.concatenate([weights for _, weights, _ in each])
    offsets = jnp.concatenate([jnp.asarray(offsets) for _, _, offsets in each])
    spec = P() if replicated else P(AXIS)

    def loss(rows, weights):
        multiply = jax.shard_map(
            jax_ep.grouped_matmul, mesh=mesh, in_specs=(P(AXIS), spec, P(AXIS)), out_specs=P(AXIS)
        )
        product = multiply(rows, weights, offsets).reshape(n_ranks, height, N)
        ends = offsets.reshape(n_ranks, -1)[:, -1:]
        in_use = jnp.arange(height, dtype=jnp.uint32) < ends
        return jnp.sum(jnp.where(in_use[..., None], product, 0) ** 2)

    def dense(rows, weights):
        total = 0.0
        for i, (x, (_, _, offsets)) in enumerate(zip(jnp.split(rows, n_ranks), each, strict=True)):
            matrices = weights if replicated else weights[3 * i : 3 * i + 3]
            for first, end, matrix in zip(offsets[:-1], offsets[1:], matrices, strict=True):
                total += jnp.sum((x[first:end] @ matrix) ** 2)
        return total

    with jax.default_matmul_precision("float32"):
        got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(rows, weights)
        wanted = jax.value_and_grad(dense, argnums=(0, 1))(rows, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-3), got, wanted)


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
    placed = token_format.layout.place(scales, offsets)
    quantized = jax_ep.quantize_weights(weights, transposed=True)
    by_element = np.repeat(np.repeat(quantized.scales, 128, 1)[:, :n], 128, 2)
    numbers = np.asarray(quantized.codes, np.float64) * by_element
    return jax_ep.QuantizedRows(codes, placed, None), quantized, offsets, (values, numbers)


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


def test_offsets_beyond_the_rows_end_at_the_last_row():
    rows, weights, offsets = make_operands([3, 5], "float32", spare=0)
    wanted = run(rows, weights, offsets)
    for end in (9, 2**31 - 1, 2**32 - 1):
        np.testing.assert_array_equal(run(rows, weights, np.uint32([0, 3, end])), wanted)


def test_weights_without_elements_are_quantized():
    for shape in ((0, 128, 8), (2, 128, 0)):
        quantized = jax_ep.quantize_weights(jnp.zeros(shape))
        assert quantized.codes.shape == (shape[0], shape[2], 128)
        assert quantized.scales.shape == (shape[0], -(-shape[2] // 128), 1)


def test_lowering_for_gpus_without_kernels_warns_and_uses_ragged_dot(monkeypatch):
    monkeypatch.setattr(matmul_primitive, "_is_built", matmul_primitive._is_built.__wrapped__)
    monkeypatch.setattr(matmul_primitive.extension, "register_cuda", lambda: None)
    module = type("module", (), {"targets": staticmethod(lambda: {})})
    monkeypatch.setattr(matmul_primitive.extension, "load_cuda", lambda: module)
    rows, weights, offsets = make_operands([3, 5])
    traced = jax.jit(jax_ep.grouped_matmul).trace(rows, weights, offsets)
    with pytest.warns(UserWarning, match="built without CUTLASS"):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_ep_grouped_matmul" not in text


def test_the_portable_lowering_matches_float64():
    """What GPUs without kernels and other platforms run."""
    rows, weights, offsets = make_operands([3, 0, 140, 64, 1], "float32")
    used = int(offsets[-1])
    for form, pair in {
        "WEIGHTS": (rows, weights),
        "TRANSPOSED_WEIGHTS": (rows, weights.swapaxes(1, 2)),
        "ROWS": (rows, rows[:, :N]),
    }.items():
        parameters = matmul_primitive.Matmul(
            matmul_primitive.MatmulForm[form], np.dtype("float32"), zeroes_unused=True
        )
        with jax.default_matmul_precision("float32"):
            (got,) = jax.jit(functools.partial(matmul_primitive._by_ragged_dot, matmul=parameters))(
                *pair, offsets
            )
        if form == "ROWS":
            x = np.asarray(rows, np.float64)
            wanted = [x[a:b].T @ x[a:b, :N] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
            np.testing.assert_allclose(got, wanted, 1e-4, 1e-4)
        else:
            np.testing.assert_allclose(got[:used], reference(rows, weights, offsets)[0], 1e-4, 1e-4)
            assert not np.asarray(got[used:]).any()


ROWS = jnp.ones((6, 16), jnp.bfloat16)
WEIGHTS = jnp.ones((2, 16, 8), jnp.bfloat16)
OFFSETS = np.uint32([0, 2, 6])


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((ROWS[0], WEIGHTS, OFFSETS), {}, r"rows must have the shape \[C, H\]"),
        ((ROWS.astype(jnp.int32), WEIGHTS, OFFSETS), {}, "rows must be bfloat16 or float16"),
        ((ROWS, WEIGHTS[:1], OFFSETS), {}, r"weights must have the shape \[L=2, H=16, N\]"),
        ((ROWS, WEIGHTS, OFFSETS), {"transposed": True}, r"\[L=2, N, H=16\]"),
        ((ROWS, WEIGHTS.astype(jnp.float32), OFFSETS), {}, "weights must be bfloat16; got float32"),
        ((ROWS, WEIGHTS, OFFSETS.astype(np.int32)), {}, "row_offsets must be uint32"),
        ((ROWS, WEIGHTS, OFFSETS[:0]), {}, "one more entry than there are groups"),
        ((ROWS, WEIGHTS, OFFSETS), {"dtype": jnp.float16}, "dtype must be bfloat16, .* float32"),
    ],
)
def test_operands_that_do_not_fit_are_rejected(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        jax_ep.grouped_matmul(*arguments, **options)


def test_codes_and_numbers_do_not_mix():
    rows, weights, offsets, _ = quantized_operands()
    with pytest.raises(TypeError, match="must both be arrays, or QuantizedRows and"):
        jax_ep.grouped_matmul(ROWS, weights, OFFSETS)
    with pytest.raises(TypeError, match="Quantize weights with quantize_weights"):
        jax_ep.grouped_matmul(rows, WEIGHTS, offsets)
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
        jax_ep.quantize_weights(WEIGHTS)
