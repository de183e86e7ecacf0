"""Work that overlaps with asynchronous calls changes no bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import assert_trees_equal, group_of, make_mesh, on_mesh, put, shards
from overlapping_layers import FORMS, gradient, gradient_of_weighted_rows, layer, scanned

# Enough tokens that a call takes longer than the work that overlaps with it.
CASE = cases.SMALL[4].replace(routing="zipf", weights="source")


@pytest.fixture
def mesh():
    return make_mesh(4)


@pytest.fixture
def group(mesh, transport):
    with group_of(CASE, transport) as group:
        yield group


def make_operands(mesh, n=1) -> list[jax.Array]:
    """Tokens, ids and weights of `n` calls, and a matrix."""
    batches = [suite.make_inputs(CASE.replace(seed=70 + i)) for i in range(n)]
    names = ("tokens", "topk_ids", "topk_weights")
    arrays = [np.stack([getattr(b, name) for b in batches], axis=1) for name in names]
    hidden = CASE.hidden_size
    matrix = np.random.default_rng(5).standard_normal((hidden, hidden)) / hidden
    matrices = np.broadcast_to(matrix, (4, *matrix.shape)).astype(np.float32)
    return put(mesh, *map(np.nan_to_num, (*arrays, matrices)))


def run(mesh, function, operands):
    return on_mesh(mesh, function)(*operands)


def rematerialized(group, form, *arrays):
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(lambda *args: gradient(group, form, *args), policy=policy)(*arrays)


FUNCTIONS = [layer, scanned, gradient, gradient_of_weighted_rows, rematerialized]


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_overlapped_work_changes_no_bit(function, form, mesh, group) -> None:
    operands = make_operands(mesh)

    def on_rank(form, tokens, ids, weights, matrix):
        return function(group, form, tokens[0], ids[0], weights[0], matrix)

    wanted = run(mesh, functools.partial(on_rank, "sync"), operands)
    for _, one in shards(mesh, wanted):
        assert all(np.abs(x.astype(np.float32)).sum() > 0 for x in jax.tree.leaves(one))
    overlapped = on_mesh(mesh, functools.partial(on_rank, form))
    for number in range(3):  # CUDA graphs may run from the second time on
        assert_trees_equal(mesh, overlapped(*operands), wanted, f"run {number}")


def test_synchronous_calls_may_run_while_others_are_in_flight(mesh, transport, group) -> None:
    """Calls of the same group and of another one; several in flight."""
    with group_of(CASE, transport, n_sms=8, timeout_s=30.0) as other:
        groups = (group, other, group, other)

        def function(is_async, tokens, ids, weights, matrix):
            def dispatch(i):
                return jax_ep.dispatch(groups[i], tokens[i], ids[i])

            if is_async:
                in_flight = [jax_ep.dispatch_async(groups[i], tokens[i], ids[i]) for i in range(2)]
                late = [dispatch(2), dispatch(3)]
                early = [
                    jax_ep.dispatch_wait(groups[i], in_flight[i], after=late) for i in range(2)
                ]
                rows = early + late
            else:
                rows = [dispatch(i) for i in range(4)]
            return [
                jax_ep.combine(groups[i], rows[i].tokens, rows[i], weights[i]) for i in range(4)
            ]

        operands = make_operands(mesh, 4)
        wanted, got = (
            run(mesh, functools.partial(function, is_async), operands) for is_async in (False, True)
        )
        assert_trees_equal(mesh, got, wanted, "call ")


def test_a_loop_may_carry_a_call_in_flight(mesh, group) -> None:
    def unrolled(tokens, ids, weights, matrix):
        for _ in range(3):
            rows = jax_ep.dispatch(group, tokens[0], ids[0])
            tokens = jax_ep.combine(group, rows.tokens, rows, weights[0])[None]
        return tokens[0]

    def looped(tokens, ids, weights, matrix):
        def step(carry, _):
            tokens, in_flight = carry
            rows = jax_ep.dispatch_wait(group, in_flight)
            tokens = jax_ep.combine(group, rows.tokens, rows, weights[0])
            return (tokens, jax_ep.dispatch_async(group, tokens, ids[0])), None

        in_flight = jax_ep.dispatch_async(group, tokens[0], ids[0])
        return jax.lax.scan(step, (tokens[0], in_flight), length=3)[0][0]

    wanted, got = (run(mesh, each, make_operands(mesh)) for each in (unrolled, looped))
    assert_trees_equal(mesh, got, wanted, "loop")


@pytest.mark.parametrize("form", FORMS[1:])
def test_vmap_of_asynchronous_calls_gives_the_bits_of_a_loop(form, mesh, group) -> None:
    def looped(tokens, ids, weights, matrix):
        results = [layer(group, "sync", tokens[i], ids[i], weights[i], matrix) for i in range(2)]
        return jnp.stack(results)

    def mapped(tokens, ids, weights, matrix):
        return jax.vmap(lambda *args: layer(group, form, *args, matrix))(tokens, ids, weights)

    wanted, got = (run(mesh, each, make_operands(mesh, 2)) for each in (looped, mapped))
    assert_trees_equal(mesh, got, wanted, "vmap")
