"""grouped_matmul_gradient: gradients of weights that are added to an accumulator."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from doc_pages import DOCS, python_blocks
from harness import AXIS, make_mesh
from jax_ep.layer.matmul import calls, choose
from oracle_matmul import SIZES, H, N, accumulated, assert_close, make_operands

UNUSUAL_BITS = np.uint32([0x80000000, 0x7FC01234, 0xFF812345, 0x00000001, 0xFF800000, 0x3F800001])


def make(sizes, dtype="bfloat16", transposed=False, spare=5):
    """Rows, cotangent, offsets and accumulator; NaN in the rows that are not in use."""
    rows, _, offsets = make_operands(sizes, dtype, spare=spare)
    rng = np.random.default_rng(sum(sizes) + 1)
    cotangent = rng.standard_normal((rows.shape[0], N), np.float32)
    cotangent[offsets[-1] :] = np.nan
    shape = (len(sizes), *((N, H) if transposed else (H, N)))
    accumulator = jnp.asarray(rng.standard_normal(shape, np.float32) * 8)
    return rows, jnp.asarray(cotangent.astype(np.dtype(dtype))), offsets, accumulator


def run(rows, cotangent, offsets, accumulator, **options):
    """Under jit, with float32 products."""
    add = functools.partial(jax_ep.grouped_matmul_gradient, **options)
    with jax.default_matmul_precision("float32"):
        return jax.jit(add)(rows, cotangent, offsets, accumulator)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sums_match_float64(sizes, dtype, transposed):
    rows, cotangent, offsets, accumulator = make(sizes, dtype, transposed)
    got = run(rows, cotangent, offsets, accumulator, transposed=transposed)
    assert got.dtype == jnp.float32
    factors = (cotangent, rows) if transposed else (rows, cotangent)
    assert_close(got, *accumulated(*factors, offsets, accumulator), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_float32_addition_adds_the_sum_over_the_rows(dtype):
    """In the same bits in every run."""
    *operands, accumulator = make([3, 140, 64, 1, 700], dtype)
    from_zero = np.asarray(run(*operands, jnp.zeros_like(accumulator)))
    wanted = np.asarray(accumulator) + from_zero
    for _ in range(2):
        got = np.asarray(run(*operands, accumulator))
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("lowering", ["kernel or tiles", "portable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_groups_without_rows_keep_their_bits(dtype, lowering):
    sizes = [0, 3, 0, 0, 50, 0]
    *operands, accumulator = make(sizes, dtype)
    empty = np.asarray(sizes) == 0
    sums, magnitudes = accumulated(*operands, accumulator)
    bits = np.asarray(accumulator).view(np.uint32).copy()
    bits[empty] = np.resize(UNUSUAL_BITS, bits[empty].shape)
    accumulator = jnp.asarray(bits.view(np.float32))
    if lowering == "portable":
        by_ragged_dot = functools.partial(calls.by_ragged_dot, matmul=calls.PRODUCTS)
        with jax.default_matmul_precision("float32"):
            (got,) = jax.jit(by_ragged_dot)(*operands, accumulator)
    else:
        got = run(*operands, accumulator)
    np.testing.assert_array_equal(np.asarray(got)[empty].view(np.uint32), bits[empty])
    assert_close(np.asarray(got)[~empty], sums[~empty], magnitudes[~empty], "float32")


def test_a_slice_of_the_groups_reads_no_other_rows():
    rows, cotangent, offsets, accumulator = make([3, 17, 0, 140, 64])
    chosen = offsets[1:5]
    others = np.ones(len(rows), bool)
    others[chosen[0] : chosen[-1]] = False
    rows, cotangent = (jnp.where(others[:, None], jnp.nan, x) for x in (rows, cotangent))
    got = run(rows, cotangent, chosen, accumulator[1:4])
    assert_close(got, *accumulated(rows, cotangent, chosen, accumulator[1:4]), "float32")


def test_offsets_beyond_the_rows_end_at_the_last_row():
    rows, cotangent, offsets, accumulator = make([3, 5], spare=0)
    wanted = run(rows, cotangent, offsets, accumulator)
    got = run(rows, cotangent, np.uint32([0, 3, 2**32 - 1]), accumulator)
    np.testing.assert_array_equal(got, wanted)


def test_arrays_without_elements_add_nothing():
    accumulator = jnp.asarray(np.resize(UNUSUAL_BITS, (2, 8, 4)).view(np.float32))
    offsets = np.zeros(3, np.uint32)
    got = run(jnp.zeros((0, 8)), jnp.zeros((0, 4)), offsets, accumulator)
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint32), np.asarray(accumulator).view(np.uint32)
    )
    empty = jnp.zeros((2, 8, 0))
    assert run(jnp.zeros((3, 8)), jnp.zeros((3, 0)), offsets, empty).shape == empty.shape


def test_a_donated_accumulator_becomes_the_result():
    *operands, accumulator = make([3, 0, 50])
    wanted = np.asarray(run(*operands, accumulator))
    assert not accumulator.is_deleted()
    step = jax.jit(jax_ep.grouped_matmul_gradient, donate_argnums=3)
    address = accumulator.unsafe_buffer_pointer()
    got = step(*operands, accumulator)
    assert got.unsafe_buffer_pointer() == address
    assert accumulator.is_deleted()
    np.testing.assert_array_equal(got, wanted)


def test_a_scan_over_microbatches_adds_their_gradients():
    """And the carry stays where the donated accumulator was."""
    sizes = [[3, 0, 50], [0, 0, 53], [20, 30, 3]]
    batches = [make(each, "float32", spare=4) for each in sizes]
    rows, cotangent, offsets = (jnp.stack(x) for x in list(zip(*batches, strict=True))[:3])
    accumulator = batches[0][3]

    @functools.partial(jax.jit, donate_argnums=0)
    def add_all(accumulator, *stacked):
        def add(accumulator, batch):
            return jax_ep.grouped_matmul_gradient(*batch, accumulator), None

        return jax.lax.scan(add, accumulator, stacked)[0]

    wanted = accumulator
    for batch in batches:
        wanted = run(*batch[:3], wanted)
    wanted, address = np.asarray(wanted), accumulator.unsafe_buffer_pointer()
    with jax.default_matmul_precision("float32"):
        got = add_all(accumulator, rows, cotangent, offsets)
    assert got.unsafe_buffer_pointer() == address
    np.testing.assert_allclose(got, wanted, 1e-6, 1e-6)


def test_the_example_of_the_page_adds_gradients_of_microbatches():
    (block,) = [text for text in python_blocks(DOCS / "experts.md") if "def backward" in text]
    names = {"jax": jax, "jax_ep": jax_ep, "functools": functools}

    def loss_by(multiply):
        def loss(sums, weights, batch):
            rows, target, offsets = batch
            product = multiply(rows, weights, offsets, sums)
            in_use = jnp.arange(len(rows), dtype=jnp.uint32) < offsets[-1]
            return jnp.sum(jnp.where(in_use[:, None], jnp.sin(product) * target, 0))

        return loss

    exec(block, names)
    names["loss"] = loss_by(names["multiply"])
    batches = [make(sizes, "float32", spare=4) for sizes in ([3, 0, 50], [0, 0, 53], [20, 30, 3])]
    stacked = [jnp.stack(x) for x in list(zip(*batches, strict=True))[:3]]
    sums, weights = batches[0][3], batches[1][3] * 0.01
    plain = loss_by(lambda rows, weights, offsets, _: jax_ep.grouped_matmul(rows, weights, offsets))
    with jax.default_matmul_precision("float32"):
        gradients = [jax.grad(plain, 1)(None, weights, batch[:3]) for batch in batches]
        wanted = np.asarray(sums) + sum(gradients)
        got = names["add_gradients"](sums, weights, stacked)
    np.testing.assert_allclose(got, wanted, 1e-5, 1e-4)


def test_vmap_agrees_with_separate_calls():
    rows, cotangent, offsets, accumulator = make([9, 0, 30])
    several = jnp.stack([accumulator, -accumulator])
    both = jnp.stack([rows, rows * 2])
    mapped = jax.vmap(jax_ep.grouped_matmul_gradient, (0, None, None, 0))
    got = jax.jit(mapped)(both, cotangent, offsets, several)
    for i in range(2):
        np.testing.assert_array_equal(got[i], run(both[i], cotangent, offsets, several[i]))


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_derivatives_match_a_dense_sum(transposed):
    rows, cotangent, offsets, accumulator = make([3, 0, 5], "float32", transposed, spare=0)

    def dense(rows, cotangent, accumulator):
        in_group = np.repeat(np.eye(3, dtype=np.float32), [3, 0, 5], axis=0)
        names = "ci,co,cg->goi" if transposed else "ci,co,cg->gio"
        return accumulator + jnp.einsum(names, rows, cotangent, in_group)

    def grouped(rows, cotangent, accumulator):
        return jax_ep.grouped_matmul_gradient(
            rows, cotangent, offsets, accumulator, transposed=transposed
        )

    def gradients(f):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x) * 0.1)), argnums=(0, 1, 2))

    with jax.default_matmul_precision("float32"):
        got, wanted = (
            jax.jit(gradients(f))(rows, cotangent, accumulator) for f in (grouped, dense)
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, wanted)


def test_each_device_adds_to_its_own_accumulator():
    n_ranks = min(2, len(jax.devices()))
    each = [make([4 + i, 0, 9 - i], "float32") for i in range(n_ranks)]
    operands = [jnp.concatenate(x) for x in zip(*each, strict=True)]
    add = jax.shard_map(
        jax_ep.grouped_matmul_gradient, mesh=make_mesh(n_ranks), in_specs=P(AXIS), out_specs=P(AXIS)
    )
    with jax.default_matmul_precision("float32"):
        got = jax.jit(add)(*operands)
    wanted = jnp.concatenate([run(*one) for one in each])
    np.testing.assert_array_equal(got, wanted)


def test_an_exported_call_takes_any_number_of_rows():
    (n_rows,) = jax.export.symbolic_shape("c")
    step = jax.jit(jax_ep.grouped_matmul_gradient)
    exported = None
    for n in (1, 7, 300):
        operands = [np.asarray(x) for x in make([n, 0, n], "float32")]
        if exported is None:
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
            types[:2] = [each.update(shape=(n_rows, each.shape[1])) for each in types[:2]]
            exported = jax.export.export(step, platforms=["cpu"])(*types)
        with jax.default_device(jax.devices("cpu")[0]):
            np.testing.assert_allclose(exported.call(*operands), step(*operands), 1e-4, 1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_call_for_gpus_adds_in_place(dtype, monkeypatch):
    """Or is made of plain operations, where there is no kernel."""
    monkeypatch.setattr(choose, "kernels", lambda: choose.Kernels.AMPERE)
    traced = jax.jit(jax_ep.grouped_matmul_gradient).trace(*make([3, 5], dtype))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = [line for line in text.splitlines() if "@jax_ep_grouped_matmul" in line]
    if dtype == "float32":
        assert not found
        return
    (call,) = found
    alias = "output_tuple_indices = [0], operand_index = 3, operand_tuple_indices = []"
    assert call.count("#stablehlo.output_operand_alias") == 1 and alias in call, call


ROWS = jnp.ones((6, 16), jnp.bfloat16)
COTANGENT = jnp.ones((6, 8), jnp.bfloat16)
OFFSETS = np.uint32([0, 2, 6])
SUMS = jnp.zeros((2, 16, 8))


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((ROWS[0], COTANGENT, OFFSETS, SUMS), {}, r"rows must have the shape \[C, H\]"),
        ((ROWS.astype(jnp.int32), COTANGENT, OFFSETS, SUMS), {}, "rows must be bfloat16 or"),
        ((ROWS, COTANGENT[:5], OFFSETS, SUMS), {}, r"cotangent must have the shape \[C=6, N\]"),
        (
            (ROWS, COTANGENT.astype(jnp.float32), OFFSETS, SUMS),
            {},
            "cotangent must be bfloat16; got float32. Cast it",
        ),
        ((ROWS, COTANGENT, OFFSETS.astype(np.int32), SUMS), {}, "row_offsets must be uint32"),
        ((ROWS, COTANGENT, OFFSETS[:0], SUMS), {}, "one more entry than there are groups"),
        ((ROWS, COTANGENT, OFFSETS, SUMS[:1]), {}, r"accumulator must .* \[L=2, H=16, N=8\]"),
        ((ROWS, COTANGENT, OFFSETS, SUMS), {"transposed": True}, r"\[L=2, N=8, H=16\]"),
        (
            (ROWS, COTANGENT, OFFSETS, SUMS.astype(jnp.bfloat16)),
            {},
            "accumulator must be float32; got bfloat16",
        ),
        ((ROWS, COTANGENT, OFFSETS, None), {}, "accumulator must be an array; got None"),
        ((ROWS, COTANGENT, OFFSETS, SUMS), {"transposed": 1}, "transposed must be True or False"),
    ],
)
def test_operands_that_do_not_fit_are_rejected(arguments, options, message):
    with pytest.raises(ValueError, match=f"^grouped_matmul_gradient: .*{message}"):
        jax_ep.grouped_matmul_gradient(*arguments, **options)
