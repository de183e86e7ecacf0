"""Work beside calls: with `then` and `after`, the bits are those of whole calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import AXIS, assert_same_bits, config_of, make_mesh, on_mesh, place, shards

# Enough tokens for a call to take longer than what stands beside it.
CASE = cases.SMALL[4].but(routing="zipf", weights="source")


@pytest.fixture
def mesh():
    return make_mesh(4)


@pytest.fixture
def group(mesh, transport):
    with jax_ep.ep_init(mesh, AXIS, config_of(CASE), transport=transport) as group:
        yield group


def operands(mesh, n=1):
    """Tokens, ids and weights of each of `n` calls, and a matrix."""
    batches = [suite.make_inputs(CASE.but(seed=70 + i), None, 0) for i in range(n)]
    names = ("tokens", "topk_ids", "topk_weights")
    arrays = [np.stack([getattr(b, name) for b in batches], axis=1) for name in names]
    hidden = CASE.hidden_size
    matrix = np.random.default_rng(5).standard_normal((hidden, hidden)) / hidden
    everywhere = np.broadcast_to(matrix, (4, *matrix.shape)).astype(np.float32)
    return [place(mesh, [np.nan_to_num(each)]) for each in (*arrays, everywhere)]


def dense(x, matrix):
    """Integers, so that no fusion of XLA rounds them in another way."""
    product = jnp.round(8 * x.astype(jnp.float32)) @ jnp.round(8 * matrix)
    return jnp.clip(product, -8, 8).astype(x.dtype)


def layer(group, overlaps, tokens, ids, weights, matrix):
    if not overlaps:
        rows = jax_ep.dispatch(group, tokens, ids)
        beside = dense(tokens, matrix)
        out = jax_ep.combine(group, 2 * rows.tokens, rows, weights)
        return out + beside + dense(beside, matrix)
    flight = jax_ep.dispatch_async(group, tokens, ids)
    beside = dense(flight.then(tokens), matrix)
    rows = jax_ep.dispatch_wait(group, flight, after=beside)
    flight = jax_ep.combine_async(group, 2 * rows.tokens, rows, weights)
    more = dense(flight.then(beside), matrix)
    return jax_ep.combine_wait(group, flight, after=more) + beside + more


def scanned(group, overlaps, tokens, ids, weights, matrix):
    def step(x, _):
        return jnp.tanh(layer(group, overlaps, x, ids, weights, matrix)), None

    return jax.lax.scan(step, tokens, length=3)[0]


def gradient(group, overlaps, tokens, ids, weights, matrix):
    def loss(tokens, weights):
        out = scanned(group, overlaps, tokens, ids, weights, matrix)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))(tokens, weights)


def rematerialised(group, overlaps, *arrays):
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(
        lambda *args: gradient(group, overlaps, *args), policy=policy
    )(*arrays)


@pytest.mark.parametrize("function", [layer, scanned, gradient, rematerialised])
def test_work_beside_calls_changes_no_bit(function, mesh, group) -> None:
    arrays = operands(mesh)

    def run(overlaps):
        def on_rank(tokens, ids, weights, matrix):
            return function(group, overlaps, tokens[0], ids[0], weights[0], matrix)

        return on_mesh(mesh, on_rank)

    wanted, got = run(False)(*arrays), run(True)
    for repeat in range(3):  # the second and third may run captured
        pairs = zip(shards(mesh, wanted), shards(mesh, got(*arrays)), strict=True)
        for (where, one), (_, other) in pairs:
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
                assert np.abs(a.astype(np.float32)).sum() > 0
                assert_same_bits(b, a, f"{where}, run {repeat}")


def test_whole_calls_stand_beside_calls_in_flight(mesh, transport, group) -> None:
    """Of the same group and of another one; several in flight."""
    n = 4
    other = jax_ep.ep_init(
        mesh, AXIS, config_of(CASE, n_sms=8, timeout_s=30.0), transport=transport
    )

    def run(tokens, ids, weights, matrix, *, overlaps):
        groups = (group, other, group, other)
        if overlaps:
            flights = {
                i: jax_ep.dispatch_async(groups[i], tokens[i], ids[i]) for i in (0, 1)
            }
            rows = [jax_ep.dispatch(groups[i], tokens[i], ids[i]) for i in (2, 3)]
            rows = [
                jax_ep.dispatch_wait(groups[i], flights[i], after=rows) for i in (0, 1)
            ] + rows
        else:
            rows = [jax_ep.dispatch(groups[i], tokens[i], ids[i]) for i in range(n)]
        return [
            jax_ep.combine(groups[i], rows[i].tokens, rows[i], weights[i])
            for i in range(n)
        ]

    arrays = operands(mesh, n)
    results = [
        on_mesh(mesh, lambda *args, o=o: run(*args, overlaps=o))(*arrays)
        for o in (False, True)
    ]
    for (where, one), (_, two) in zip(*(shards(mesh, r) for r in results), strict=True):
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same_bits(b, a, f"{where}, call {i}")
    other.close()


def test_a_call_in_flight_is_carried_by_a_loop(mesh, group) -> None:
    def step(carry, _, ids, weights):
        tokens, flight = carry
        rows = jax_ep.dispatch_wait(group, flight)
        tokens = jax_ep.combine(group, rows.tokens, rows, weights)
        return (tokens, jax_ep.dispatch_async(group, tokens, ids)), None

    def run(tokens, ids, weights, matrix, *, carries):
        if not carries:
            for _ in range(3):
                rows = jax_ep.dispatch(group, tokens[0], ids[0])
                tokens = jax_ep.combine(group, rows.tokens, rows, weights[0])[None]
            return tokens[0]
        flight = jax_ep.dispatch_async(group, tokens[0], ids[0])
        body = lambda carry, x: step(carry, x, ids[0], weights[0])  # noqa: E731
        return jax.lax.scan(body, (tokens[0], flight), length=3)[0][0]

    arrays = operands(mesh)
    results = [
        on_mesh(mesh, lambda *args, c=c: run(*args, carries=c))(*arrays)
        for c in (False, True)
    ]
    for (where, one), (_, two) in zip(*(shards(mesh, r) for r in results), strict=True):
        assert_same_bits(two, one, f"{where}")


def test_vmap_of_calls_in_flight(mesh, group) -> None:
    def run(tokens, ids, weights, matrix, *, overlaps):
        call = lambda *args: layer(group, overlaps, *args, matrix)  # noqa: E731
        if overlaps:
            return jax.vmap(call)(tokens, ids, weights)
        return jnp.stack([call(tokens[i], ids[i], weights[i]) for i in range(2)])

    arrays = operands(mesh, 2)
    results = [
        on_mesh(mesh, lambda *args, o=o: run(*args, overlaps=o))(*arrays)
        for o in (False, True)
    ]
    for (where, one), (_, two) in zip(*(shards(mesh, r) for r in results), strict=True):
        assert_same_bits(two, one, f"{where}")
