"""Calls in halves: any order of halves and whole calls gives the whole calls' bits."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import AXIS, assert_same_bits, config_of, make_mesh, on_mesh, place, shards

N_CALLS = 3
CASE = cases.SMALL[4].but(routing="zipf", weights="source")

# Which call each half belongs to, in program order: its first appearance begins it.
ORDERS = [(0, 0, 1, 1, 2), (0, 1, 0, 1, 2), (0, 1, 1, 0, 2), (0, 2, 1, 0, 1)]


def in_order(order, begin, end, whole):
    """Results of all calls; the call that is named once is whole."""
    flights, results = {}, [None] * N_CALLS
    for call in order:
        if order.count(call) == 1:
            results[call] = whole(call)
        elif call not in flights:
            flights[call] = begin(call)
        else:
            results[call] = end(flights[call])
    return results


def run_calls(group, order, tokens, topk_ids, topk_weights):
    """Dispatches and combines `N_CALLS` batches; `order` None: as whole calls."""

    def dispatch(call):
        return jax_ep.dispatch(group, tokens[call], topk_ids[call])

    def combine(call):
        d = dispatched[call]
        return jax_ep.combine(group, 2 * d.tokens, d, topk_weights[call])

    if order is None:
        dispatched = [dispatch(call) for call in range(N_CALLS)]
        outs = [combine(call) for call in range(N_CALLS)]
    else:
        dispatched = in_order(
            order,
            lambda i: jax_ep.dispatch_async(group, tokens[i], topk_ids[i]),
            lambda flight: jax_ep.dispatch_wait(group, flight),
            dispatch,
        )
        outs = in_order(
            order,
            lambda i: jax_ep.combine_async(
                group, 2 * dispatched[i].tokens, dispatched[i], topk_weights[i]
            ),
            lambda flight: jax_ep.combine_wait(group, flight),
            combine,
        )
    return [(suite.fields(d), out) for d, out in zip(dispatched, outs, strict=True)]


def inputs(mesh):
    """Tokens, ids and weights of all calls: `[N_CALLS, T, ...]` on each rank."""
    batches = [
        suite.make_inputs(CASE.but(seed=50 + i), None, 0) for i in range(N_CALLS)
    ]
    names = ("tokens", "topk_ids", "topk_weights")
    stacked = (np.stack([getattr(b, name) for b in batches], axis=1) for name in names)
    return [place(mesh, [np.nan_to_num(each)]) for each in stacked]


def used(result) -> list:
    """A call's results without the rows that are not in use."""
    fields, out = result
    n_used = int(fields["row_offsets"][-1])
    fields = {
        name: value[:n_used] if name in suite.ROW_FIELDS else value
        for name, value in fields.items()
    }
    return [*fields.items(), ("combined", out)]


@pytest.mark.parametrize("order", ORDERS)
def test_halves_in_any_order_give_the_bits_of_whole_calls(order, transport):
    mesh = make_mesh(4)
    group = jax_ep.ep_init(mesh, AXIS, config_of(CASE), transport=transport)
    operands = inputs(mesh)
    whole, halves = (
        on_mesh(mesh, lambda *args, o=o: run_calls(group, o, *args))(*operands)
        for o in (None, order)
    )
    pairs = zip(shards(mesh, whole), shards(mesh, halves), strict=True)
    for (where, one), (_, other) in pairs:
        for call in range(N_CALLS):
            wanted, got = used(one[call]), used(other[call])
            for (name, value), (_, actual) in zip(wanted, got, strict=True):
                assert_same_bits(actual, value, f"{where}, call {call}, {name}")


@pytest.mark.parametrize("weights_at", ["source", "row"])
def test_gradients_flow_through_halves(weights_at, transport):
    mesh = make_mesh(4)
    group = jax_ep.ep_init(mesh, AXIS, config_of(CASE), transport=transport)

    def loss(tokens, weights, topk_ids, split):
        at_row, at_source = ([weights], []) if weights_at == "row" else ([], [weights])
        if split:
            flight = jax_ep.dispatch_async(group, tokens, topk_ids, *at_row)
            dispatched = jax_ep.dispatch_wait(group, flight)
            rows = jnp.tanh(dispatched.tokens)
            flight = jax_ep.combine_async(group, rows, dispatched, *at_source)
            out = jax_ep.combine_wait(group, flight)
        else:
            dispatched = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
            rows = jnp.tanh(dispatched.tokens)
            out = jax_ep.combine(group, rows, dispatched, *at_source)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def grads(split, tokens, topk_ids, weights):
        return jax.grad(loss, argnums=(0, 1))(tokens[0], weights[0], topk_ids[0], split)

    operands = inputs(mesh)
    whole, halves = (
        on_mesh(mesh, lambda *args, s=s: grads(s, *args))(*operands)
        for s in (False, True)
    )
    pairs = zip(shards(mesh, whole), shards(mesh, halves), strict=True)
    for (where, one), (_, other) in pairs:
        for name, wanted, got in zip(("tokens", "weights"), one, other, strict=True):
            assert np.abs(wanted.astype(np.float32)).sum() > 0
            assert_same_bits(got, wanted, f"{where}, gradient of {name}")


@pytest.mark.parametrize("split", [False, True])
def test_a_loop_stacks_what_straight_code_gives(split, transport):
    """What a call gives is stored in larger arrays, and read by the next call, too."""
    mesh, n_turns = make_mesh(4), 3
    group = jax_ep.ep_init(mesh, AXIS, config_of(CASE), transport=transport)

    def turn(tokens, topk_ids, weights):
        if split:
            flight = jax_ep.dispatch_async(group, tokens, topk_ids)
            beside = flight.then(tokens) * 2
            rows = jax_ep.dispatch_wait(group, flight, after=beside)
        else:
            rows = jax_ep.dispatch(group, tokens, topk_ids)
        out = jax_ep.combine(group, 2 * rows.tokens, rows, weights) / 4
        return out, (out, rows.tokens, rows.row_offsets)

    def in_use(stacked):
        outs, rows, row_offsets = stacked
        is_used = jnp.arange(rows.shape[1]) < row_offsets[:, -1:].astype(jnp.int32)
        return outs, jnp.where(is_used[..., None], rows, 0), row_offsets

    def loop(tokens, topk_ids, weights):
        def step(x, _):
            return turn(x, topk_ids[0], weights[0])

        return in_use(jax.lax.scan(step, tokens[0], length=n_turns)[1])

    def straight(tokens, topk_ids, weights):
        x, results = tokens[0], []
        for _ in range(n_turns):
            x, result = turn(x, topk_ids[0], weights[0])
            results.append(result)
        return in_use(jax.tree.map(lambda *xs: jnp.stack(xs), *results))

    operands = inputs(mesh)
    looped, unrolled = (on_mesh(mesh, f)(*operands) for f in (loop, straight))
    pairs = itertools.zip_longest(shards(mesh, unrolled), shards(mesh, looped))
    for (where, wanted), (_, got) in pairs:
        for name, a, b in zip(("out", "tokens", "offsets"), got, wanted, strict=True):
            assert_same_bits(a, b, f"{name}, {where}")
        assert got[1].any()


def test_halves_stand_in_a_loop(transport):
    mesh = make_mesh(4)
    group = jax_ep.ep_init(mesh, AXIS, config_of(CASE), transport=transport)

    def loop(tokens, topk_ids, weights, split):
        def step(carry, _):
            if split:
                flight = jax_ep.dispatch_async(group, carry, topk_ids[0])
                dispatched = jax_ep.dispatch_wait(group, flight)
                flight = jax_ep.combine_async(
                    group, dispatched.tokens, dispatched, weights[0]
                )
                return jax_ep.combine_wait(group, flight), None
            dispatched = jax_ep.dispatch(group, carry, topk_ids[0])
            out = jax_ep.combine(group, dispatched.tokens, dispatched, weights[0])
            return out, None

        return jax.lax.scan(step, tokens[0], length=5)[0]

    operands = inputs(mesh)
    whole, halves = (
        on_mesh(mesh, lambda *args, s=s: loop(*args, s))(*operands)
        for s in (False, True)
    )
    pairs = itertools.zip_longest(shards(mesh, whole), shards(mesh, halves))
    for (where, wanted), (_, got) in pairs:
        assert_same_bits(got, wanted, f"{where}")
