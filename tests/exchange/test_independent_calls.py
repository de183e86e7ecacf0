"""Calls that do not depend on each other: many of them, in any order, on realistic sizes.

XLA starts independent operations in different orders on different devices, but only in programs
with more than a few operations on more than toy buffers. So these tests make many calls on at least
256 x 256 elements, and run them often.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import suite
from harness import (
    AXIS,
    assert_same_bits,
    assert_trees_equal,
    config_of,
    group_of,
    make_mesh,
    on_mesh,
    put,
    shards,
)
from independent_calls import big_case, check_independent_calls_do_not_mix_their_data


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n_ranks", "n_runs", "with_psum"),
    [
        pytest.param(8, 12, False, marks=pytest.mark.thorough),
        pytest.param(4, 12, True, marks=pytest.mark.xla_collectives),
        pytest.param(8, 12, True, marks=[pytest.mark.xla_collectives, pytest.mark.thorough]),
        pytest.param(32, 3, True, marks=pytest.mark.xla_collectives),
    ],
)
def test_independent_calls_do_not_mix_their_data(n_ranks, n_runs, with_psum, transport):
    check_independent_calls_do_not_mix_their_data(n_ranks, n_runs, with_psum, transport)


@pytest.mark.thorough
def test_a_backward_pass_may_run_with_other_forward_passes(transport):
    """Two layers' gradients in one program equal those of each layer alone, bitwise."""
    first, second = big_case(8, 1), big_case(8, 2)
    group = group_of(first, transport)

    def layer(tokens, topk_ids, topk_weights):
        def loss(tokens, topk_weights):
            dispatched = jax_ep.dispatch(group, tokens, topk_ids)
            out = dispatched.tokens * jnp.bfloat16(2)
            out = jax_ep.combine(group, out, dispatched, topk_weights)
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        gradients = jax.value_and_grad(loss, argnums=(0, 1))
        return gradients(tokens, jnp.nan_to_num(topk_weights))

    one = on_mesh(group.mesh, lambda args: layer(*args))
    both = on_mesh(group.mesh, lambda args: [layer(*each) for each in args])
    operands = [put(group.mesh, *suite.make_inputs(c).arrays()[:3]) for c in (first, second)]
    alone = [one(each) for each in operands]
    for _ in range(5):
        assert_trees_equal(group.mesh, both(operands), alone, "gradients")


@pytest.mark.parametrize("n_runs", [20])
def test_queued_runs_do_not_mix_their_data(n_runs, transport):
    """Runs of one program, each with its own tokens, are enqueued without waiting for results."""
    case = big_case(8, 7, "none")
    group = group_of(case, transport)
    inputs = suite.make_inputs(case)
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids)

    def body(tokens, topk_ids, scale):
        return jax_ep.dispatch(group, tokens * scale, topk_ids).tokens, scale

    run = on_mesh(group.mesh, body)
    scales = [jnp.full((8,), 2.0**i, jnp.bfloat16) for i in range(n_runs)]
    outs = [run(*operands, scale) for scale in scales]
    rows = [oracle.rows_of(inputs.routed, inputs.tokens, rank) for rank in range(8)]
    for i, out in enumerate(outs):
        for (_, rank), (got, _) in shards(group.mesh, out):
            wanted = (rows[rank].astype("float32") * 2.0**i).astype(rows[rank].dtype)
            assert_same_bits(got[: len(wanted)], wanted, f"run {i}, rank {rank}")


def labels(rows):
    """What a result tells only once ranks have asked each other."""
    return rows.expert_counts, rows.row_source_ranks


@pytest.mark.usefixtures("one_process")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what transport host does")
def test_ranks_of_host_share_nothing_by_collectives_of_xla():
    """XLA:CPU may start these in different orders, if one is in a branch that waits for a call."""
    case = cases.SMALL[4]
    config = config_of(case, on_drop="raise")
    placement = jax_ep.ExpertPlacement(np.arange(case.n_experts), case.n_ranks)
    with jax_ep.ep_init(make_mesh(case.n_ranks), AXIS, config, transport="host") as group:

        def body(tokens, topk_ids, weights):
            def total(weights):
                copies = jax_ep.replicate_experts(group, weights, placement)
                return copies.sum(), labels(jax_ep.dispatch(group, tokens, topk_ids))

            return jax.value_and_grad(total, has_aux=True)(weights)

        weights = np.ones((case.n_ranks, case.n_experts // case.n_ranks, 3), np.float32)
        operands = put(group.mesh, *suite.make_inputs(case).arrays()[:2], weights)
        text = on_mesh(group.mesh, body).lower(*operands).as_text()
    assert text.count("@jax_ep_exchange(") == 5
    for collective in ("all_gather", "all_to_all", "all_reduce", "collective_permute"):
        assert f"stablehlo.{collective}" not in text


@pytest.mark.usefixtures("one_process")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what transport host does")
@pytest.mark.parametrize(
    ("splits", "sent", "received", "message"),
    [
        (False, (3,), (2, 4), "sent must have the shape"),
        (True, (2, 4), (2, 3), "sent must have the shape"),
        (True, (6,), (2, 3), "sent must have the shape"),
        (False, (3,), (3, 3), "received must have the shape"),
        (False, (3,), (6,), "received must have the shape"),
    ],
)
def test_an_exchange_whose_buffers_do_not_fit_is_refused(splits, sent, received, message):
    """Such as in a program that was changed by hand."""
    with group_of(cases.SMALL[2], "host") as group:

        def body(x):
            result = jax.ShapeDtypeStruct(received, jnp.uint8)
            call = jax.ffi.ffi_call("jax_ep_exchange", result)
            rank = jax.lax.axis_index(AXIS)
            return call(rank, x, group=group.geometry.key, splits=np.bool_(splits))

        operands = put(group.mesh, np.ones((2, *sent), np.uint8))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(on_mesh(group.mesh, body)(*operands))


@pytest.mark.xla_collectives
def test_labels_of_calls_in_a_branch_and_outside_of_it(transport):
    """Ranks that reach the calls at different times ask each other in any order."""
    inside, outside = big_case(4, 3), big_case(4, 4)
    group = group_of(inside, transport)

    def body(operands, others):
        def branch(scale):
            rows = jax_ep.dispatch(group, operands[0] * scale, operands[1])
            return labels(rows), rows.row_expert_ids, jax_ep.combine(group, rows.tokens, rows)

        def loss(tokens):
            rows = jax_ep.dispatch(group, tokens, others[1])
            has_token = rows.row_source_ranks[:, None] >= 0
            out = jax_ep.combine(group, jnp.where(has_token, rows.tokens, 0), rows)
            return jnp.sum(jnp.square(out.astype(jnp.float32))), labels(rows)

        with_dispatch, other = (functools.partial(branch, jnp.bfloat16(x)) for x in (1, 2))
        is_true = jax.lax.psum(jnp.int32(1), AXIS) > 0
        return jax.lax.cond(is_true, with_dispatch, other)[0], jax.grad(loss, has_aux=True)(
            others[0]
        )[1]

    made = [suite.make_inputs(case) for case in (inside, outside)]
    operands = [put(group.mesh, *inputs.arrays()[:2]) for inputs in made]
    run = on_mesh(group.mesh, body)
    for _ in range(5):
        for (_, rank), results in shards(group.mesh, run(*operands)):
            for inputs, (counts, sources) in zip(made, results, strict=True):
                wanted = [np.bincount(ids.ravel(), minlength=8) for ids in inputs.topk_ids]
                np.testing.assert_array_equal(counts, wanted)
                n_rows = sum(int(each[2 * rank : 2 * rank + 2].sum()) for each in wanted)
                assert np.count_nonzero(sources >= 0) == n_rows
