"""Many calls in one program that do not depend on each other, against the oracle."""

import functools

import jax
import jax.numpy as jnp

import cases
import jax_ep
import oracle
import suite
from harness import AXIS, assert_same_bits, group_of, on_mesh, put, shards

N_CALLS = 8
N_TOKENS, HIDDEN_SIZE = 256, 256


def big_case(n_ranks: int, seed: int, weights: str = "source") -> cases.Case:
    """256 x 256 tokens per rank, with room for twice the mean number of rows."""
    return cases.Case(
        n_ranks=n_ranks,
        n_experts=n_ranks * 2,
        top_k=2,
        hidden_size=HIDDEN_SIZE,
        max_tokens=N_TOKENS,
        recv_capacity=1024,
        weights=weights,
        seed=seed,
    )


@functools.lru_cache(maxsize=2)
def inputs_and_results(n_ranks: int) -> list[tuple[suite.Inputs, list[dict]]]:
    """Inputs of each call, and the oracle's rows and combined tokens on each rank."""
    calls = []
    for seed in range(N_CALLS):
        inputs = suite.make_inputs(big_case(n_ranks, seed))
        combined = oracle.combine(
            inputs.routed, inputs.expert_out, topk_weights=inputs.topk_weights
        )
        rows = [oracle.rows_of(inputs.routed, inputs.tokens, rank) for rank in range(n_ranks)]
        pairs = zip(rows, combined, strict=True)
        calls.append((inputs, [{"tokens": r, "combined": c} for r, c in pairs]))
    return calls


def make_independent_calls(group, with_psum: bool, operands):
    """A dispatch and a combine for each entry of `operands`, with or without a collective."""
    results = []
    for tokens, topk_ids, topk_weights, expert_out in operands:
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        combined = jax_ep.combine(group, expert_out, dispatched, topk_weights)
        result = {"tokens": dispatched.tokens, "combined": combined}
        if with_psum:
            first_id = jnp.broadcast_to(topk_ids[0, 0], (N_TOKENS, HIDDEN_SIZE))
            result["sum"] = jax.lax.pcast(jax.lax.psum(first_id, AXIS), AXIS, to="varying")
        results.append(result)
    return results


def check_independent_calls_do_not_mix_their_data(n_ranks, n_runs, with_psum, transport):
    group = group_of(big_case(n_ranks, 0), transport)
    calls = inputs_and_results(n_ranks)
    operands = [put(group.mesh, *inputs.arrays()[:4]) for inputs, _ in calls]
    run = on_mesh(group.mesh, functools.partial(make_independent_calls, group, with_psum))
    for number in range(n_runs):
        for (_, rank), results in shards(group.mesh, run(operands)):
            for call, (inputs, wanted) in enumerate(calls):
                what = f"run {number}, call {call}, rank {rank}"
                result, rows = results[call], wanted[rank]["tokens"]
                assert_same_bits(result["tokens"][: len(rows)], rows, what)
                assert_same_bits(result["combined"], wanted[rank]["combined"], what)
                if with_psum:
                    wanted_sum = sum(ids[0, 0] for ids in inputs.topk_ids)
                    assert (result["sum"] == wanted_sum).all(), what
