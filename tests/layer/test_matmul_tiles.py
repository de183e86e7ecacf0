"""The grouped matmuls in plain JAX, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from harness import make_mesh, on_mesh
from jax_ep.ffi.lowering import like, make_primitive
from jax_ep.layer.matmul import tiles

K, N = 24, 40
DTYPES = ["float32", "bfloat16", "float16"]
TOLERANCES = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
# Name: group sizes and capacity.
GROUPS = {
    "full": ([8, 8, 8, 8], 32),
    "unequal": ([0, 70, 0, 3, 33, 1, 0], 130),
    "all_empty": ([0, 0, 0], 16),
    "one_group": ([601], 700),
    "fewer_rows_than_a_tile": ([2, 0, 3], 6),
    "one_row": ([0, 1], 1),
    "mostly_unused": ([3, 0, 40, 21], 700),
}
RANDOM = np.random.default_rng(7)
for i in range(2):
    counts = RANDOM.multinomial(90, RANDOM.dirichlet(np.full(7, 0.5)))
    GROUPS[f"random_{i}"] = (counts.tolist(), 90 + 30 * i)


def offsets_of(sizes) -> np.ndarray:
    return np.cumsum([0, *sizes]).astype(np.uint32)


def make(shape, dtype, n_used=None, seed=0) -> np.ndarray:
    """Random numbers; NaN in the rows from `n_used` on."""
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    if n_used is not None:
        x[n_used:] = np.nan
    return x.astype(jnp.dtype(dtype))


def expected_by_weights(rows, weights, offsets, transposed) -> np.ndarray:
    rows, weights = rows.astype(np.float64), weights.astype(np.float64)
    if transposed:
        weights = weights.swapaxes(1, 2)
    out = np.zeros((rows.shape[0], weights.shape[2]))
    for group, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        out[begin:end] = rows[begin:end] @ weights[group]
    return out


def expected_by_rows(lhs, rhs, offsets) -> np.ndarray:
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    pairs = zip(offsets[:-1], offsets[1:], strict=True)
    return np.stack([lhs[begin:end].T @ rhs[begin:end] for begin, end in pairs])


def assert_near(actual, expected, dtype) -> None:
    assert actual.dtype == jnp.dtype(dtype)
    assert actual.shape == expected.shape
    actual = np.asarray(actual).astype(np.float64)
    scale = max(np.abs(expected).max(initial=0), 1)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCES[str(dtype)] * scale)


def by_weights(transposed, dtype):
    return functools.partial(tiles.rows_by_weights, transposed=transposed, dtype=dtype)


def by_rows(dtype):
    return functools.partial(tiles.rows_by_rows, dtype=dtype)


def check(sizes, capacity, dtype, out_dtype, transposed=False) -> None:
    offsets = offsets_of(sizes)
    n_used = int(offsets[-1])
    rows = make((capacity, K), dtype, n_used)
    weights = make((len(sizes), N, K) if transposed else (len(sizes), K, N), dtype, seed=1)
    out = jax.jit(by_weights(transposed, out_dtype))(rows, weights, offsets)
    assert_near(out, expected_by_weights(rows, weights, offsets, transposed), out_dtype)
    assert not np.asarray(out)[n_used:].any()
    other = make((capacity, N), dtype, n_used, seed=2)
    gradient = jax.jit(by_rows(out_dtype))(rows, other, offsets)
    assert_near(gradient, expected_by_rows(rows, other, offsets), out_dtype)
    empty = np.asarray(sizes) == 0
    assert not np.asarray(gradient)[empty].any()


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name):
    check(*GROUPS[name], "float32", "float32", transposed=len(name) % 2 == 0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, transposed):
    check(*GROUPS["unequal"], dtype, dtype, transposed)


@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_result_dtype(dtype, out_dtype):
    check(*GROUPS["unequal"], dtype, out_dtype)


def test_one_program_serves_all_group_sizes():
    rows, weights = make((48, K), "float32"), make((5, K, N), "float32", seed=1)
    fn = jax.jit(by_weights(False, "float32"))
    for sizes in ([48, 0, 0, 0, 0], [0, 1, 2, 3, 4], [9, 10, 9, 10, 10], [0] * 5):
        offsets = offsets_of(sizes)
        assert_near(
            fn(rows, weights, offsets),
            expected_by_weights(rows, weights, offsets, False),
            "float32",
        )
    assert fn._cache_size() == 1


def test_no_rows():
    offsets = np.zeros(4, np.uint32)
    out = by_weights(False, "float32")(make((0, K), "float32"), make((3, K, N), "float32"), offsets)
    assert out.shape == (0, N)
    out = by_rows("bfloat16")(make((0, K), "float32"), make((0, N), "float32"), offsets)
    assert out.shape == (3, K, N) and not np.asarray(out).any()


def test_precision():
    """Matmuls of float32 take the precision of `jax_default_matmul_precision`."""
    operands = make((8, K), "float32"), make((2, K, N), "float32"), offsets_of([3, 5])
    with jax.default_matmul_precision("highest"):
        text = jax.jit(by_weights(False, "float32")).lower(*operands).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text


SHARD_SIZES = ([3, 0, 14], [0, 0, 0], [1, 1, 1], [20, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shard_map(one_process, dtype):
    """Each device has groups of its own."""
    mesh = make_mesh(4)
    offsets = np.stack([offsets_of(sizes) for sizes in SHARD_SIZES])
    rows = np.stack([make((24, K), dtype, o[-1], seed=i) for i, o in enumerate(offsets)])
    other = np.stack([make((24, N), dtype, o[-1], seed=9 + i) for i, o in enumerate(offsets)])
    weights = make((4, 3, K, N), dtype, seed=5)

    def both(rows, other, weights, offsets):
        out = by_weights(False, dtype)(rows, weights, offsets)
        return out, by_rows(dtype)(rows, other, offsets)

    out, gradient = on_mesh(mesh, both)(rows, other, weights, offsets)
    for i, o in enumerate(offsets):
        assert_near(out[i], expected_by_weights(rows[i], weights[i], o, False), dtype)
        assert_near(gradient[i], expected_by_rows(rows[i], other[i], o), dtype)


def test_lowering_rule(one_process):
    """The functions serve as the lowering of a primitive, inside `jax.shard_map` too."""

    def lower(*operands):
        return [by_weights(True, "float32")(*operands)]

    primitive = make_primitive("test_matmul_tiles", cpu=mlir.lower_fun(lower))
    primitive.def_abstract_eval(lambda rows, *_: [like(rows, (rows.shape[0], N), "float32")])
    mesh = make_mesh(2)
    rows, weights = make((2, 9, K), "float32"), make((2, 2, N, K), "float32", seed=1)
    offsets = np.stack([offsets_of([4, 2]), offsets_of([0, 9])])
    (out,) = on_mesh(mesh, primitive.bind)(rows, weights, offsets)
    for i in range(2):
        rows[i, offsets[i, -1] :] = 0
        assert_near(out[i], expected_by_weights(rows[i], weights[i], offsets[i], True), "float32")
