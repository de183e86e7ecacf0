"""grouped_matmul of numbers against matmuls in float64, and its gradients."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import AXIS, make_mesh
from jax_ep.layer.matmul import calls, choose
from oracle_matmul import SIZES, N, assert_close, make_operands, reference


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("begin, end", [(1, 4), (0, 2), (2, 5), (1, 2), (3, 3)])
def test_a_slice_of_the_groups_has_their_products_and_gradients(begin, end, dtype):
    """As an adapter of some experts needs it; rows of others are not in use, and may be NaN."""
    rows, weights, offsets = make_operands([3, 17, 0, 140, 64], dtype)
    chosen, matrices = offsets[begin : end + 1], weights[begin:end]
    first, last = int(chosen[0]), int(chosen[-1])
    others = np.ones(len(rows), bool)
    others[first:last] = False
    rows = jnp.where(others[:, None], jnp.nan, rows)

    @jax.jit
    def run_with_gradients(rows, matrices):
        product, pull = jax.vjp(lambda *x: jax_ep.grouped_matmul(*x, chosen), rows, matrices)
        return product, *pull(jnp.where(others[:, None], jnp.nan, product))

    with jax.default_matmul_precision("float32"):
        got, grad_rows, grad_matrices = run_with_gradients(rows, matrices)
    if first == last:
        assert not np.asarray(grad_rows).any()
        return
    got = jnp.where(others[:, None], 0, got)  # what is there may be any bits
    wanted, magnitudes = reference(rows, matrices, chosen)
    assert_close(got[first:last], wanted, magnitudes, dtype)
    wanted, magnitudes = reference(got, matrices, chosen, transposed=True)
    assert_close(grad_rows[first:last], wanted, magnitudes, dtype)
    assert not np.asarray(grad_rows)[others].any(), "rows of other groups"
    for i, span in enumerate(zip(chosen[:-1], chosen[1:], strict=True)):
        left, right = (np.asarray(x[slice(*span)], np.float64) for x in (rows, got))
        assert_close(grad_matrices[i], left.T @ right, abs(left).T @ abs(right), dtype)


@pytest.mark.thorough
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


@pytest.mark.thorough
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


def test_offsets_beyond_the_rows_end_at_the_last_row():
    rows, weights, offsets = make_operands([3, 5], "float32", spare=0)
    wanted = run(rows, weights, offsets)
    for end in (9, 2**31 - 1, 2**32 - 1):
        np.testing.assert_array_equal(run(rows, weights, np.uint32([0, 3, end])), wanted)


def test_lowering_for_gpus_without_kernels_warns_and_uses_ragged_dot(monkeypatch):
    monkeypatch.setattr(choose, "kernels", choose.kernels.__wrapped__)
    monkeypatch.setattr(choose.extension, "register_cuda", lambda: None)
    module = type("module", (), {"targets": staticmethod(lambda: {})})
    monkeypatch.setattr(choose.extension, "load_cuda", lambda: module)
    rows, weights, offsets = make_operands([3, 5])
    traced = jax.jit(jax_ep.grouped_matmul).trace(rows, weights, offsets)
    with pytest.warns(UserWarning, match="built without CUTLASS"):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_ep_grouped_matmul" not in text


def test_an_exported_call_takes_any_number_of_rows():
    def loss(*operands):
        return jnp.sum(jax_ep.grouped_matmul(*operands) ** 2)

    (n_rows,) = jax.export.symbolic_shape("c")
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    exported = None
    for n in (1, 7, 300):
        rows, weights, offsets = map(np.asarray, make_operands([n, 0, n], "float32"))
        if exported is None:
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (rows, weights, offsets)]
            types[0] = types[0].update(shape=(n_rows, rows.shape[1]))
            exported = jax.export.export(step, platforms=["cpu"])(*types)
        with jax.default_device(jax.devices("cpu")[0]):
            got, wanted = (f(rows, weights, offsets) for f in (exported.call, step))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-3), got, wanted)


def test_the_portable_lowering_matches_float64():
    """The fallback of GPUs without kernels and of other platforms."""
    rows, weights, offsets = make_operands([3, 0, 140, 64, 1], "float32")
    used = int(offsets[-1])
    for form, pair in {
        "WEIGHTS": (rows, weights),
        "TRANSPOSED_WEIGHTS": (rows, weights.swapaxes(1, 2)),
        "ROWS": (rows, rows[:, :N]),
    }.items():
        parameters = calls.Matmul(calls.MatmulForm[form], np.dtype("float32"), zeroes_unused=True)
        with jax.default_matmul_precision("float32"):
            (got,) = jax.jit(functools.partial(calls.by_ragged_dot, matmul=parameters))(
                *pair, offsets
            )
        if form == "ROWS":
            x = np.asarray(rows, np.float64)
            wanted = [x[a:b].T @ x[a:b, :N] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
            np.testing.assert_allclose(got, wanted, 1e-4, 1e-4)
        else:
            np.testing.assert_allclose(got[:used], reference(rows, weights, offsets)[0], 1e-4, 1e-4)
            assert not np.asarray(got[used:]).any()


def test_the_portable_lowering_ignores_weights_of_groups_without_rows():
    """Of copies that no expert was lent to."""
    rows, weights, offsets = make_operands([3, 0, 140, 64, 1], "float32")
    matmul = calls.Matmul(calls.MatmulForm.WEIGHTS, np.dtype("float32"), continues=True)
    kept = jnp.full((rows.shape[0], N), 7, jnp.float32)
    for first in (0, 1):  # the other rows are of groups before
        operands = rows, weights.at[1].set(jnp.nan)[first:], offsets[first:], kept
        with jax.default_matmul_precision("float32"):
            (got,) = jax.jit(functools.partial(calls.by_ragged_dot, matmul=matmul))(*operands)
        wanted = reference(rows, weights, offsets)[0].copy()
        wanted[: offsets[first]] = 7
        np.testing.assert_allclose(got[: offsets[-1]], wanted, 1e-4, 1e-4)


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
        ((ROWS, WEIGHTS.astype(jnp.int32), OFFSETS), {}, "weights must be bfloat16 or float16"),
        (
            (ROWS, WEIGHTS.astype(jnp.float32), OFFSETS),
            {},
            r"rows and weights .* got bfloat16 rows and float32 weights.*jax_ep.Plain\('float32'\)",
        ),
        (
            (ROWS.astype(jnp.float32), WEIGHTS, OFFSETS),
            {},
            r"got float32 rows and bfloat16 weights. Cast one of them with .astype\(\).$",
        ),
        ((ROWS, WEIGHTS, OFFSETS.astype(np.int32)), {}, "row_offsets must be uint32"),
        ((ROWS, WEIGHTS, OFFSETS[:0]), {}, "one more entry than there are groups"),
        ((ROWS, WEIGHTS, OFFSETS), {"dtype": jnp.float16}, "dtype must be bfloat16, .* float32"),
    ],
)
def test_operands_that_do_not_fit_are_rejected(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        jax_ep.grouped_matmul(*arguments, **options)
