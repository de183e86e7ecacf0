"""Calls that do not depend on each other: any number, in any order, on real sizes.

XLA starts independent operations in different orders on different devices, but only in
graphs with more than a few operations on more than toy buffers, so these tests use many
calls on at least 256 x 256 elements, and run them often.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import cases
import jax_ep
import oracle
import suite
from harness import (
    AXIS,
    assert_same_bits,
    config_of,
    make_mesh,
    on_mesh,
    place,
    shards,
)

N_CALLS = 8


def big_case(n_ranks: int, seed: int, weights: str) -> cases.Case:
    """Gives a shape of 256 x 256 tokens a rank, with room for twice the mean load."""
    return cases.Case(
        n_ranks=n_ranks,
        n_experts=n_ranks * 2,
        top_k=2,
        hidden_size=256,
        max_tokens=256,
        recv_capacity=1024,
        weights=weights,
        routing="uniform",
        seed=seed,
    )


def results_of(case: cases.Case, inputs: suite.Inputs) -> list[dict]:
    """Gives the oracle's rows and combined tokens of each rank."""
    rows = oracle.dispatch(
        case.n_ranks,
        case.n_experts,
        inputs.routed.n_rows,
        inputs.tokens,
        inputs.topk_ids,
    )
    combined = oracle.combine(
        inputs.routed, inputs.expert_out, topk_weights=inputs.topk_weights
    )
    return [
        {"tokens": r.tokens, "combined": c} for r, c in zip(rows, combined, strict=True)
    ]


@pytest.mark.parametrize(
    ("n_ranks", "n_runs", "with_psum"),
    [
        (8, 12, False),
        *(
            pytest.param(*each, True, marks=pytest.mark.xla_collectives)
            for each in ((4, 12), (8, 12), (32, 3))
        ),
    ],
)
def test_independent_calls_do_not_mix_their_data(n_ranks, n_runs, with_psum, transport):
    mesh = make_mesh(n_ranks)
    calls = [big_case(n_ranks, seed, "source") for seed in range(N_CALLS)]
    group = jax_ep.ep_init(mesh, AXIS, config_of(calls[0]), transport=transport)

    def body(operands):
        results = []
        for tokens, topk_ids, topk_weights, expert_out, _ in operands:
            dispatched = jax_ep.dispatch(group, tokens, topk_ids)
            result = {
                "tokens": dispatched.tokens,
                "combined": jax_ep.combine(group, expert_out, dispatched, topk_weights),
            }
            if with_psum:
                first_id = jnp.broadcast_to(topk_ids[0, 0], (256, 256))
                result["sum"] = jax.lax.pcast(
                    jax.lax.psum(first_id, AXIS), AXIS, to="varying"
                )
            results.append(result)
        return results

    inputs = [suite.make_inputs(case) for case in calls]
    operands = [tuple(place(mesh, [x]) for x in each.arrays()) for each in inputs]
    wanted = [results_of(c, each) for c, each in zip(calls, inputs, strict=True)]
    run = on_mesh(mesh, body)
    for number in range(n_runs):
        out = run(operands)
        for (_, rank), results in shards(mesh, out):
            for call, result in enumerate(results):
                what = f"run {number}, call {call}, rank {rank}"
                rows = wanted[call][rank]["tokens"]
                combined = wanted[call][rank]["combined"]
                assert_same_bits(result["tokens"][: len(rows)], rows, what)
                assert_same_bits(result["combined"], combined, what)
                if with_psum:
                    wanted_sum = sum(ids[0, 0] for ids in inputs[call].topk_ids)
                    assert (result["sum"] == wanted_sum).all(), what


def test_a_backward_pass_may_run_beside_other_forward_passes(transport):
    """Two layers' gradients in one program equal each layer's own, in bits."""
    mesh = make_mesh(8)
    first, second = big_case(8, 1, "source"), big_case(8, 2, "source")
    group = jax_ep.ep_init(mesh, AXIS, config_of(first), transport=transport)

    def layer(tokens, topk_ids, topk_weights, *_):
        def loss(tokens, topk_weights):
            dispatched = jax_ep.dispatch(group, tokens, topk_ids)
            out = dispatched.tokens * jnp.bfloat16(2)
            out = jax_ep.combine(group, out, dispatched, topk_weights)
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        return jax.value_and_grad(loss, argnums=(0, 1))(
            tokens, jnp.nan_to_num(topk_weights)
        )

    one = on_mesh(mesh, lambda args: layer(*args))
    both = on_mesh(mesh, lambda args: [layer(*each) for each in args])
    operands = [
        tuple(place(mesh, [x]) for x in suite.make_inputs(case).arrays())
        for case in (first, second)
    ]
    alone = [dict(shards(mesh, one(each))) for each in operands]
    for _ in range(5):
        for where, results in shards(mesh, both(operands)):
            for number, result in enumerate(results):
                for got, wanted in zip(
                    jax.tree.leaves(result),
                    jax.tree.leaves(alone[number][where]),
                    strict=True,
                ):
                    assert_same_bits(got, wanted, f"layer {number}, {where}")


@pytest.mark.parametrize("n_runs", [20])
def test_queued_runs_do_not_wait_for_the_one_before(n_runs, transport):
    """Runs are queued without waiting; each has its own tokens, in the same program."""
    mesh = make_mesh(8)
    case = big_case(8, 7, "none")
    group = jax_ep.ep_init(mesh, AXIS, config_of(case), transport=transport)
    inputs = suite.make_inputs(case)
    tokens, topk_ids = (place(mesh, [x]) for x in inputs.arrays()[:2])

    def body(tokens, topk_ids, scale):
        rows = jax_ep.dispatch(group, tokens * scale, topk_ids).tokens
        return rows, scale

    run = on_mesh(mesh, body)
    scales = [jnp.full((8,), 2.0**i, jnp.bfloat16) for i in range(n_runs)]
    outs = [run(tokens, topk_ids, scale) for scale in scales]
    rows = [r.tokens for r in oracle.dispatch(8, 16, 1024, *inputs.arrays()[:2])]
    for i, out in enumerate(outs):
        for (_, rank), (got, _) in shards(mesh, out):
            used = rows[rank]
            wanted = (used.astype("float32") * 2.0**i).astype(used.dtype)
            assert_same_bits(got[: len(used)], wanted, f"run {i}, rank {rank}")
