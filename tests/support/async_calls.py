"""Asynchronous calls in any order, against synchronous ones, bitwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import cases
import jax_ep
import suite
from harness import assert_same_bits, assert_trees_equal, group_of, make_mesh, on_mesh, put, shards

N_CALLS = 3
CASE = cases.SMALL[4].replace(routing="zipf", weights="source")
# The call that each start or wait belongs to, in program order: the first mention of a call starts
# it, the second waits for it. A call that is mentioned once is synchronous.
ORDERS = [(0, 0, 1, 1, 2), (0, 1, 0, 1, 2), (0, 1, 1, 0, 2), (0, 2, 1, 0, 1)]


def make_calls(order, start, wait, call_synchronously) -> list:
    """The results of all calls, made in that order."""
    in_flight, results = {}, [None] * N_CALLS
    for call in order:
        if order.count(call) == 1:
            results[call] = call_synchronously(call)
        elif call not in in_flight:
            in_flight[call] = start(call)
        else:
            results[call] = wait(in_flight[call])
    return results


def run_calls(group, order, tokens, topk_ids, topk_weights):
    """Dispatches and combines `N_CALLS` batches; synchronously if `order` is None."""
    order = range(N_CALLS) if order is None else order
    dispatched = make_calls(
        order,
        lambda i: jax_ep.dispatch_async(group, tokens[i], topk_ids[i]),
        lambda in_flight: jax_ep.dispatch_wait(group, in_flight),
        lambda i: jax_ep.dispatch(group, tokens[i], topk_ids[i]),
    )
    rows = [2 * each.tokens for each in dispatched]
    outs = make_calls(
        order,
        lambda i: jax_ep.combine_async(group, rows[i], dispatched[i], topk_weights[i]),
        lambda in_flight: jax_ep.combine_wait(group, in_flight),
        lambda i: jax_ep.combine(group, rows[i], dispatched[i], topk_weights[i]),
    )
    return [(suite.fields(d), out) for d, out in zip(dispatched, outs, strict=True)]


@functools.cache
def make_operands(mesh) -> list[jax.Array]:
    """Tokens, ids and weights of all calls: `[N_CALLS, T, ...]` on each rank."""
    batches = [suite.make_inputs(CASE.replace(seed=50 + i)) for i in range(N_CALLS)]
    names = ("tokens", "topk_ids", "topk_weights")
    stacked = (np.stack([getattr(b, name) for b in batches], axis=1) for name in names)
    return put(mesh, *map(np.nan_to_num, stacked))


@functools.cache
def run(function, transport: str, *args):
    """The results of `function(group, *args, *operands)`; equal runs are made once."""
    group = group_of(CASE, transport)
    on_rank = functools.partial(function, group, *args)
    return on_mesh(group.mesh, on_rank)(*make_operands(group.mesh))


def used(result) -> list:
    """A call's results without unused rows."""
    fields, out = result
    n_used = int(fields["row_offsets"][-1])
    fields = {
        name: value[:n_used] if name in suite.ROW_FIELDS else value
        for name, value in fields.items()
    }
    return [*fields.items(), ("combined", out)]


def check_asynchronous_calls_in_any_order_match_synchronous_ones(order, transport):
    mesh = make_mesh(4)
    wanted, got = (run(run_calls, transport, each) for each in (None, order))
    pairs = zip(shards(mesh, wanted), shards(mesh, got), strict=True)
    for (where, one), (_, other) in pairs:
        for call in range(N_CALLS):
            values = zip(used(one[call]), used(other[call]), strict=True)
            for (name, value), (_, actual) in values:
                assert_same_bits(actual, value, f"{where}, call {call}, {name}")


def gradients(group, weights_at, is_async, tokens, topk_ids, topk_weights):
    """Gradients of a layer in its tokens and weights."""

    def loss(tokens, weights):
        at_row, at_source = suite.weights_for(weights_at, weights)
        rows = suite.dispatch(group, tokens, topk_ids[0], *at_row, is_async=is_async)
        out = jnp.tanh(rows.tokens)
        out = suite.combine(group, out, rows, *at_source, is_async=is_async)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))(tokens[0], topk_weights[0])


def loop(group, is_async, tokens, topk_ids, weights):
    def step(x, _):
        rows = suite.dispatch(group, x, topk_ids[0], is_async=is_async)
        return suite.combine(group, rows.tokens, rows, weights[0], is_async=is_async), None

    return jax.lax.scan(step, tokens[0], length=5)[0]


def check_asynchronous_calls_may_be_in_a_loop(transport):
    wanted, got = (run(loop, transport, each) for each in (False, True))
    assert_trees_equal(make_mesh(4), got, wanted, "loop")
