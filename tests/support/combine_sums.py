"""The sums of combine against the oracle, bitwise."""

import functools

import jax.numpy as jnp

import jax_ep
import oracle
import suite
from harness import assert_same_bits, group_of, on_mesh, put, shards


@functools.cache
def compiled_sums(case, transport):
    """The mesh, and a jitted function that makes the same sums in every way."""
    group = group_of(case, transport)

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        plain = suite.poison(jax_ep.dispatch(group, tokens, topk_ids))
        weighted = suite.poison(jax_ep.dispatch(group, tokens, topk_ids, topk_weights))
        ones = jnp.ones_like(topk_weights)

        def sums(*arguments):
            call = functools.partial(jax_ep.combine, group, expert_out, *arguments)
            return {"alone": call(), "with residual": call(residual=residual)}

        return {
            "at dispatch": sums(weighted),
            "at combine": sums(plain, topk_weights),
            "nowhere": sums(plain),
            "of 1": sums(plain, ones),
        }

    return group.mesh, on_mesh(group.mesh, body, keep_unused=True)


def check_sums(case, transport: str, topk_ids=None) -> None:
    """All ways give the oracle's bits; `topk_ids`, if given, replace the case's own."""
    program_case = case.replace(routing="uniform", seed=0)  # neither changes the program
    mesh, run = compiled_sums(program_case, transport)
    inputs = suite.make_inputs(case, topk_ids)
    wanted = expected_sums(case, inputs)
    for (_, rank), got in shards(mesh, run(*put(mesh, *inputs.arrays()))):
        for way, sums in got.items():
            is_weighted = way in ("at dispatch", "at combine")
            for name, out in sums.items():
                what = f"{case.name} on {transport}, weights {way}, {name}, rank {rank}"
                assert_same_bits(out, wanted[is_weighted][name][rank], what)


def expected_sums(case, inputs: suite.Inputs) -> list[dict]:
    """The oracle's sums of all ranks: unweighted and weighted."""
    results = []
    for weights in (None, inputs.topk_weights):
        combine = functools.partial(
            oracle.combine,
            inputs.routed,
            inputs.expert_out,
            topk_weights=weights,
            n_nodes=case.n_nodes,
        )
        residual = inputs.residual
        results.append({"alone": combine(), "with residual": combine(residual=residual)})
    return results
