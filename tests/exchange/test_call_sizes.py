"""Calls below their group's sizes: less capacity, fewer elements per row.

Each gives the bits of a group that was made with these sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import assert_trees_equal, group_of, make_mesh, on_mesh, params, put

SMALL = cases.SMALL[4]
CAPACITIES = [
    SMALL.replace(recv_capacity=60),
    SMALL.replace(recv_capacity=1, weights="row"),
    SMALL.replace(recv_capacity=10**6, weights="none"),
    SMALL.replace(recv_capacity=29, **cases.FLAGS["shared"]),
    SMALL.replace(recv_capacity=4, **cases.FLAGS["both"]),
    cases.QUANTIZED_SMALL["blockwise_fp8"].replace(recv_capacity=32, weights="row"),
    cases.QUANTIZED_SMALL["nvfp4"].replace(recv_capacity=32),
]
# Of groups with rows of 512 elements.
WIDTHS = [
    SMALL.replace(hidden_size=8),
    SMALL.replace(hidden_size=200, weights="row"),
    SMALL.replace(hidden_size=504, weights="none", recv_capacity=60),
    SMALL.replace(hidden_size=4, token_dtype="float32", combine_dtype="float32"),
    SMALL.replace(hidden_size=64, **cases.FLAGS["shared"]),
    SMALL.replace(hidden_size=64, weights="row", **cases.FLAGS["both"]),
    *(
        cases.QUANTIZED_SMALL[name].replace(hidden_size=size, weights="row")
        for name, size in zip(cases.QUANTIZED_NAMES, (128, 64, 96, 32), strict=True)
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", params(CAPACITIES))
def test_calls_of_less_capacity_match_the_oracle(case, is_async, transport):
    mesh = make_mesh(case.n_ranks)
    suite.check(case, transport, mesh, is_async=is_async, of_group={"recv_capacity": None})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", params(WIDTHS))
def test_calls_of_narrower_rows_match_the_oracle(case, is_async, transport):
    mesh = make_mesh(case.n_ranks)
    of_group = {"hidden_size": 512, "recv_capacity": None}
    suite.check(case, transport, mesh, is_async=is_async, of_group=of_group)


def layer(group, capacity, operands, topk_ids):
    """Tokens of any width; rows of half that width return."""
    tokens, topk_weights = operands
    rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights, recv_capacity=capacity)
    results = jnp.tanh(jax_ep.dequantize(rows))
    results = results[:, : tokens.shape[1] // 2].astype(group.config.combine_dtype)
    out = jax_ep.combine(group, results, rows)
    return jnp.sum(out.astype(jnp.float32) ** 2), (out, rows.n_dropped)


@pytest.mark.parametrize("name", ["bfloat16", "blockwise_fp8"])
def test_gradients_are_those_of_a_group_of_these_sizes(name, transport):
    case = SMALL if name == "bfloat16" else cases.QUANTIZED_SMALL[name]
    case = case.replace(hidden_size=256, recv_capacity=60)

    def value_and_gradients(capacity, **sizes):
        group = group_of(case, transport, **sizes)
        gradient = jax.value_and_grad(
            functools.partial(layer, group, capacity), argnums=0, has_aux=True
        )
        body = lambda tokens, topk_ids, weights: gradient((tokens, weights), topk_ids)  # noqa: E731
        inputs = suite.make_inputs(case)
        weights = [np.nan_to_num(each) for each in inputs.topk_weights]
        run = on_mesh(group.mesh, body)
        return group.mesh, run(*put(group.mesh, inputs.tokens, inputs.topk_ids, weights))

    _, got = value_and_gradients(60, recv_capacity=None, hidden_size=512)
    mesh, wanted = value_and_gradients(None)
    assert_trees_equal(mesh, got, wanted, name)


@pytest.mark.usefixtures("one_process")
def test_properties_of_rows_have_the_rows_of_the_call(transport):
    group = group_of(SMALL, transport)

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids, recv_capacity=60)
        return rows.row_expert_ids, rows.row_source_ranks, jax_ep.dequantize(rows)

    inputs = suite.make_inputs(SMALL)
    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    assert [x.shape[:2] for x in out] == [(4, 60)] * 3


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("capacity", [10**6, np.int64(10**6), np.int64(2**40), 2**40])
def test_a_larger_capacity_is_the_groups(capacity, transport):
    group = group_of(SMALL, transport)

    def body(tokens, topk_ids):
        return jax_ep.dispatch(group, tokens, topk_ids, recv_capacity=capacity).tokens

    inputs = suite.make_inputs(SMALL)
    out = jax.eval_shape(on_mesh(group.mesh, body), inputs.tokens, inputs.topk_ids)
    assert out.shape[1] == group.max_recv_tokens


def call(group, *, tokens=64, rows=None, residual=None, capacity=None, dtype=jnp.bfloat16):
    """Traces a dispatch and a combine of arrays with so many elements per row."""

    def body(topk_ids):
        x = jnp.zeros((topk_ids.shape[0], tokens), dtype)
        dispatched = jax_ep.dispatch(group, x, topk_ids, recv_capacity=capacity)
        y = jnp.zeros((dispatched.tokens.shape[0], rows or tokens), jnp.bfloat16)
        z = jnp.zeros((topk_ids.shape[0], residual or rows or tokens), jnp.bfloat16)
        return jax_ep.combine(group, y, dispatched, residual=z)

    ids = jnp.zeros((4, 12, SMALL.top_k), jnp.int32)
    return jax.eval_shape(on_mesh(group.mesh, body).trace, ids)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tokens": 136}, r"tokens must have the shape \[T, H=128\]; got \(12, 136\)"),
        ({"tokens": 60}, "tokens with fewer .* multiple of 16 bytes per row; got 60 elements, 120"),
        ({"tokens": 0}, "tokens with fewer elements than hidden_size must .*; got 0 elements"),
        ({"rows": 136}, r"expert_out must have the shape \[C=\d+, H=128\]"),
        ({"rows": 4}, "expert_out with fewer .* a multiple of 16 bytes per row; got 4 elements, 8"),
        ({"rows": 64, "residual": 128}, r"residual must have the shape \[T=12, H=64\]"),
        ({"capacity": 0}, "dispatch: recv_capacity must be positive; got 0"),
        ({"capacity": 1.5}, "dispatch: recv_capacity must be a positive integer; got 1.5"),
    ],
)
def test_other_sizes_are_refused(sizes, message, transport):
    with pytest.raises(ValueError, match=message):
        call(group_of(SMALL, transport), **sizes)


@pytest.mark.usefixtures("one_process")
def test_fewer_elements_must_fill_the_formats_blocks(transport):
    group = group_of(cases.QUANTIZED_SMALL["blockwise_fp8"], transport)
    with pytest.raises(ValueError, match="must be a multiple of 128 for blockwise_fp8"):
        call(group, tokens=192)
    with pytest.raises(ValueError, match="dispatch: recv_capacity must be a multiple of 4, as bl"):
        call(group, tokens=128, capacity=30)
