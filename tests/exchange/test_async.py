"""Asynchronous calls, in any order with synchronous ones, give the synchronous calls' bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from async_calls import (
    ORDERS,
    check_asynchronous_calls_in_any_order_match_synchronous_ones,
    check_asynchronous_calls_may_be_in_a_loop,
    gradients,
    run,
)
from harness import assert_trees_equal, make_mesh, shards


@pytest.mark.parametrize("order", ORDERS)
def test_asynchronous_calls_in_any_order_match_synchronous_ones(order, transport):
    check_asynchronous_calls_in_any_order_match_synchronous_ones(order, transport)


@pytest.mark.parametrize("weights_at", ["source", "row"])
def test_gradients_of_asynchronous_calls_match_synchronous_ones(weights_at, transport):
    wanted, got = (run(gradients, transport, weights_at, each) for each in (False, True))
    mesh = make_mesh(4)
    for _, each in shards(mesh, wanted):
        assert all(np.abs(array.astype(np.float32)).sum() > 0 for array in each)
    assert_trees_equal(mesh, got, wanted, "gradients")


N_ITERATIONS = 3


def layer(group, is_async, x, topk_ids, weights):
    """A layer, and the results that a loop stacks."""
    if is_async:
        in_flight = jax_ep.dispatch_async(group, x, topk_ids[0])
        overlapped = in_flight.then(x) * 2
        rows = jax_ep.dispatch_wait(group, in_flight, after=overlapped)
    else:
        rows = jax_ep.dispatch(group, x, topk_ids[0])
    out = jax_ep.combine(group, 2 * rows.tokens, rows, weights[0]) / 4
    return out, (out, rows.tokens, rows.row_offsets)


def stack_in_loop(group, is_async, tokens, topk_ids, weights):
    def step(x, _):
        return layer(group, is_async, x, topk_ids, weights)

    return without_unused_rows(jax.lax.scan(step, tokens[0], length=N_ITERATIONS)[1])


def stack_unrolled(group, is_async, tokens, topk_ids, weights):
    x, results = tokens[0], []
    for _ in range(N_ITERATIONS):
        x, result = layer(group, is_async, x, topk_ids, weights)
        results.append(result)
    return without_unused_rows(jax.tree.map(lambda *xs: jnp.stack(xs), *results))


def without_unused_rows(stacked):
    outs, rows, row_offsets = stacked
    is_used = jnp.arange(rows.shape[1]) < row_offsets[:, -1:].astype(jnp.int32)
    return outs, jnp.where(is_used[..., None], rows, 0), row_offsets


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_stacks_what_unrolled_code_gives(is_async, transport):
    """The results of a call go to slices of larger arrays, and to the next call."""
    wanted, got = (run(each, transport, is_async) for each in (stack_unrolled, stack_in_loop))
    mesh = make_mesh(4)
    assert_trees_equal(mesh, got, wanted, "stacked")
    assert all(rows.any() for _, (_, rows, _) in shards(mesh, got))


@pytest.mark.thorough
def test_asynchronous_calls_may_be_in_a_loop(transport):
    check_asynchronous_calls_may_be_in_a_loop(transport)
