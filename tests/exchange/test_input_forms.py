"""Tokens with several leading dimensions, ids of any integer dtype, weights of any float dtype.

Each gives the bits of the plain form: `[T, H]`, int32, float32.
"""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import cases
import jax_ep
import suite
from harness import (
    AXIS,
    assert_same_bits,
    assert_trees_equal,
    group_of,
    make_mesh,
    on_mesh,
    put,
    shards,
)
from jax_ep.router import RouterConfig

CASE = cases.SMALL[4].replace(routing="out_of_range")
LEADING = [(2, 12), (2, 3, 4), (1, 1, 1, 24)]
E, K, T = CASE.n_experts, CASE.top_k, CASE.n_tokens


def operands_of(case, leading=None) -> list[np.ndarray]:
    """Tokens, ids and weights of all ranks, `[R, *leading, ...]`."""
    arrays = suite.make_inputs(case).arrays()[:3]
    stacked = [np.nan_to_num(np.stack(array)) for array in arrays]
    return [x.reshape(len(x), *(leading or x.shape[1:-1]), x.shape[-1]) for x in stacked]


def run(group, body, operands, **options):
    return on_mesh(group.mesh, body, **options)(*put(group.mesh, *operands))


def flat(body):
    """`body` on `[T, ...]`, its results in the leading dimensions of the operands."""

    def run_flat(*operands):
        leading = operands[0].shape[:-1]
        out = body(*(x.reshape(-1, x.shape[-1]) for x in operands))
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)

    return run_flat


def layer(group, weights_at, tokens, topk_ids, topk_weights, is_async=False):
    """Combines rows with weights and a residual."""
    at_row, at_source = suite.weights_for(weights_at, topk_weights)
    rows = suite.dispatch(group, tokens, topk_ids, *at_row, is_async=is_async)
    results = jax_ep.dequantize(rows, group.config.combine_dtype) * 2
    residual = tokens.astype(results.dtype)
    return suite.combine(group, results, rows, *at_source, residual=residual, is_async=is_async)


def every_choice(group, tokens, topk_ids, topk_weights):
    rows = jax_ep.dispatch(group, tokens, topk_ids)
    return jax_ep.combine(group, rows.tokens, rows, reduce=False)


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_results_have_the_leading_dimensions_of_the_tokens(leading, transport):
    group, operands = group_of(CASE, transport), operands_of(CASE, leading)
    shapes = {layer: (*leading, CASE.hidden_size), every_choice: (*leading, K, CASE.hidden_size)}
    for function, shape in shapes.items():
        at = ("source",) if function is layer else ()
        body = functools.partial(function, group, *at)
        got, wanted = (run(group, each, operands) for each in (body, flat(body)))
        assert got.shape == (CASE.n_ranks, *shape)
        assert_trees_equal(group.mesh, got, wanted, function.__name__)


def test_a_dispatched_result_keeps_the_shape_of_the_ids(transport):
    """Everything else is as for tokens in one list, counts of invalid ids included."""
    group, operands = group_of(CASE, transport), operands_of(CASE, (2, 3, 4))

    def body(is_flat, tokens, topk_ids, topk_weights):
        if is_flat:
            tokens, topk_ids = (x.reshape(-1, x.shape[-1]) for x in (tokens, topk_ids))
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        fields = suite.fields(rows)
        used = jnp.arange(group.max_recv_tokens) < rows.row_offsets[-1].astype(jnp.int32)
        for name in ("tokens", "src_info"):
            fields[name] = jnp.where(used[:, None], fields[name], 0)
        return fields.pop("topk_ids"), fields

    got, wanted = (
        run(group, functools.partial(body, is_flat), operands) for is_flat in (False, True)
    )
    assert got[0].shape == (CASE.n_ranks, 2, 3, 4, K)
    for (_, rank), (topk_ids, fields) in shards(group.mesh, got):
        np.testing.assert_array_equal(topk_ids, operands[1][rank])
        assert fields["n_invalid"] > 0, rank
    assert_trees_equal(group.mesh, got[1], wanted[1], "fields")


VARIANTS = {
    "weights at dispatch": ({}, "row"),
    "shared expert": (cases.FLAGS["shared"], "source"),
    "same tokens": (cases.FLAGS["both"], "none"),
    "quantized": ({"token_format": "mxfp8", "hidden_size": 128}, "row"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "is_async"), [*((name, False) for name in VARIANTS), ("weights at dispatch", True)]
)
def test_every_feature_takes_leading_dimensions(name, is_async, transport):
    changes, weights_at = VARIANTS[name]
    case = CASE.replace(**changes)
    group, operands = group_of(case, transport), operands_of(case, (4, 6))

    def losses(*operands):
        out = layer(group, weights_at, *operands, is_async=is_async)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    def body(tokens, topk_ids, topk_weights):
        pulled = jax.value_and_grad(losses, argnums=(0, 2), has_aux=True)
        (_, out), grads = pulled(tokens, topk_ids, topk_weights)
        return out, grads

    got, wanted = (run(group, each, operands) for each in (body, flat(body)))
    for where, (_, grads) in shards(group.mesh, got):
        assert all(np.any(grad) for grad in grads[: 2 if weights_at != "none" else 1]), where
    assert_trees_equal(group.mesh, got, wanted, name)


@pytest.mark.parametrize("leading", [(0, 3), (3, 0)], ids=str)
def test_there_may_be_no_tokens(leading, transport):
    """As an inner value: XLA of jax 0.11 crashes on empty operands of `shard_map`."""
    group = group_of(CASE, transport)

    def body(x):
        tokens = jnp.zeros((*leading, CASE.hidden_size), jnp.bfloat16)
        ids = jnp.zeros((*leading, K), jnp.int32)
        rows = jax_ep.dispatch(group, tokens, ids)
        outs = [jax_ep.combine(group, rows.tokens, rows, reduce=each) for each in (True, False)]
        assert [out.shape for out in outs] == [tokens.shape, (*leading, K, CASE.hidden_size)]
        return rows.row_offsets

    for where, row_offsets in shards(group.mesh, run(group, body, (np.zeros(CASE.n_ranks),))):
        assert not np.any(row_offsets), where


@pytest.mark.parametrize("transform", ["vmap", "scan", "remat"])
def test_transformations_keep_leading_dimensions(transform, transport):
    group, operands = group_of(CASE, transport), operands_of(CASE, (2, 3, 4))

    def transformed(layer, tokens, topk_ids, topk_weights):
        one = functools.partial(layer, topk_ids=topk_ids, topk_weights=topk_weights)
        if transform == "vmap":
            return jax.vmap(one)(jnp.stack([tokens, -tokens])).sum(0)
        if transform == "scan":
            return jax.lax.scan(lambda x, _: (one(x) / 4, None), tokens, length=2)[0]
        policy = jax.checkpoint_policies.save_only_these_names(jax_ep.DISPATCH_NAME)
        return jax.checkpoint(one, policy=policy)(tokens)

    def body(is_flat, tokens, topk_ids, topk_weights):
        def inner(tokens, topk_ids, topk_weights):
            each = functools.partial(layer, group, "row")
            return (flat(each) if is_flat else each)(tokens, topk_ids, topk_weights)

        def loss(tokens):
            out = transformed(inner, tokens, topk_ids, topk_weights)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(tokens)

    got, wanted = (
        run(group, functools.partial(body, is_flat), operands) for is_flat in (False, True)
    )
    assert_trees_equal(group.mesh, got, wanted, transform)


@pytest.mark.usefixtures("one_process")
def test_leading_dimensions_under_vmap_with_spmd_axis_name(transport):
    """The inner function sees `[B, S, H]`; "dp" is mapped by `vmap`."""
    case = cases.SMALL[2].replace(max_tokens=8)
    group = group_of(case, transport, make_mesh(2, dp=2))
    rng = np.random.default_rng(1)
    tokens = rng.normal(size=(2, 4, 4, case.hidden_size)).astype(jnp.bfloat16)
    ids = rng.integers(case.n_experts, size=(2, 4, 4, case.top_k), dtype=np.int32)
    weights = rng.random((2, 4, 4, case.top_k), np.float32)

    def gradients(body):
        sharded = jax.shard_map(
            body, mesh=group.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        mapped = jax.vmap(sharded, spmd_axis_name="dp")

        def loss(tokens, weights):
            return jnp.sum(mapped(tokens, ids, weights).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(tokens, weights)

    body = functools.partial(layer, group, "row")
    got, wanted = gradients(body), gradients(flat(body))
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other, "gradient")


def primitives_of(jaxpr) -> list[str]:
    """The names of all primitives but the mapped function's own slicing of operands."""
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            names += primitives_of(inner)
    return names


def test_the_plain_form_adds_no_operation(transport):
    """`[T, H]` tokens with int32 ids and float32 weights go to the call as they are."""
    if transport == "xla" or cases.N_NODES > 1:
        pytest.skip("its calls are made of such operations")
    group = group_of(CASE, transport)

    def body(tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        return jax_ep.combine(group, rows.tokens, rows)

    spec = P(AXIS)
    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=spec, out_specs=spec)
    operands = [x.reshape(-1, x.shape[-1]) for x in operands_of(CASE)]
    names = primitives_of(jax.make_jaxpr(mapped)(*operands).jaxpr)
    assert "jax_ep_combine" in names
    assert not {"reshape", "convert_element_type", "min", "max"} & set(names), names


# Ids that are no expert, and would be one, or -1, if they were cut off to 32 bits.
WRAPPING = {
    "int64": [2**32, 2**32 + 3, -(2**32) + 1, -(2**32) - 1, 2**63 - 1, -(2**63)],
    "uint64": [2**32 + 3, 2**32 - 1, 2**64 - 1],
    "uint32": [2**32 - 1, 2**31],
    "uint16": [2**16 - 1, E],
    "uint8": [2**8 - 1, E],
    "int16": [-(2**15), 2**15 - 1],
    "int8": [-(2**7), E, 2**7 - 1],
}


def ids_with(dtype, wrong) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens; ids of that dtype, some of them wrong; int32 ids with E in place of the wrong."""
    case = CASE.replace(routing="uniform" if dtype.startswith("u") else "with_minus_one")
    tokens, ids, _ = operands_of(case)
    rng = np.random.default_rng(3)
    is_wrong = rng.random(ids.shape) < 0.3
    given = np.where(is_wrong, rng.choice(np.array(wrong, dtype), ids.shape), ids.astype(dtype))
    return tokens, given, np.where(is_wrong, E, ids)


def dispatch_and_return(group, tokens, topk_ids):
    rows = jax_ep.dispatch(group, tokens, topk_ids)
    out = jax_ep.combine(group, rows.tokens, rows)
    return out, rows.row_offsets, rows.n_invalid, rows.topk_ids


@pytest.mark.parametrize("dtype", WRAPPING)
def test_ids_of_every_integer_dtype_name_the_same_experts(dtype, transport):
    """Ids that are no expert in the given dtype stay none, and are counted."""
    group = group_of(CASE, transport)
    tokens, ids, plain_ids = ids_with(dtype, WRAPPING[dtype])
    body = functools.partial(dispatch_and_return, group)
    with jax.enable_x64(True):
        got = run(group, body, (tokens, ids))
    wanted = run(group, body, (tokens, plain_ids))
    assert_trees_equal(group.mesh, got[:3], wanted[:3], dtype)
    assert got[3].dtype == np.int32
    for (_, rank), (_, _, n_invalid, topk_ids) in shards(group.mesh, got):
        valid = plain_ids[rank] < E
        assert n_invalid == np.sum(plain_ids[rank] == E) > 0
        np.testing.assert_array_equal(topk_ids[valid], plain_ids[rank][valid])


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_numpy_ids_need_no_x64(dtype, transport):
    """They are constants here, which JAX alone would wrap around to 32 bits."""
    group = group_of(CASE, transport)
    tokens, ids, plain_ids = (x[0] for x in ids_with(dtype, WRAPPING[dtype]))

    def body(topk_ids, rank):
        return dispatch_and_return(group, jnp.asarray(tokens), topk_ids)[:3]

    ranks = np.zeros(CASE.n_ranks)
    got, wanted = (run(group, functools.partial(body, each), (ranks,)) for each in (ids, plain_ids))
    assert_trees_equal(group.mesh, got, wanted, dtype)


def test_flags_may_be_those_of_numpy(transport):
    group = group_of(CASE, transport)

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        flags = False, np.False_, True, np.True_
        return [jax_ep.combine(group, rows.tokens, rows, reduce=flag) for flag in flags]

    outs = run(group, body, operands_of(CASE)[:2])
    assert_trees_equal(group.mesh, outs[1::2], outs[::2], "reduce")
    assert RouterConfig(normalize=np.False_).normalize is False
    assert jax_ep.ExpertPlacement(np.arange(4), 2, local_first=np.True_).local_first is True


def test_python_ids_beyond_int32_are_counted_as_invalid(transport):
    group = group_of(CASE, transport)
    ids = [[2**40, *range(1, K)]] * T

    def body(tokens):
        return dispatch_and_return(group, tokens, ids)[2][None]

    assert (np.asarray(run(group, body, operands_of(CASE)[:1])) == T).all()


@pytest.mark.parametrize(
    ("dtype", "weights_at"),
    [("bfloat16", "source"), *((d, "row") for d in ("bfloat16", "float16", "float64"))],
)
def test_weights_of_every_float_dtype_count_as_float32(dtype, weights_at, transport):
    """Their gradient is the float32 weights' gradient, rounded to their dtype."""
    group = group_of(CASE, transport)
    tokens, ids, weights = operands_of(CASE)
    weights = weights.astype(dtype)

    def body(tokens, topk_ids, topk_weights):
        def loss(tokens, topk_weights):
            out = layer(group, weights_at, tokens, topk_ids, topk_weights)
            return jnp.sum(out.astype(jnp.float32) * 2**-8), out

        grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(tokens, topk_weights)
        return out, *grads

    with jax.enable_x64(dtype == "float64"):
        got = run(group, body, (tokens, ids, weights))
    wanted = run(group, body, (tokens, ids, weights.astype(np.float32)))
    assert got[2].dtype == weights.dtype
    assert_trees_equal(group.mesh, got[:2], wanted[:2], dtype)
    pairs = zip(shards(group.mesh, got[2]), shards(group.mesh, wanted[2]), strict=True)
    for (where, one), (_, other) in pairs:
        assert_same_bits(one, other.astype(dtype), f"gradient of weights, {where}")


def test_wide_numpy_weights_need_no_x64(transport):
    group = group_of(CASE, transport)
    tokens, ids, weights = (x[0] for x in operands_of(CASE))

    def body(topk_weights, rank):
        return layer(group, "row", jnp.asarray(tokens), jnp.asarray(ids), topk_weights)

    ranks = np.zeros(CASE.n_ranks)
    got, wanted = (
        run(group, functools.partial(body, weights.astype(dtype)), (ranks,))
        for dtype in (np.float64, np.float32)
    )
    assert_trees_equal(group.mesh, got, wanted, "weights")
