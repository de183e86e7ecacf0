"""The sum of combine: the same bits wherever the weights are given, on any number of nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import suite
from combine_sums import check_sums
from harness import (
    assert_same_bits,
    assert_trees_equal,
    each_node_by_itself,
    group_of,
    on_mesh,
    params,
    put,
    shards,
    skip_if_xla_crashes,
)

NODES = [(n_ranks, n_nodes) for n_ranks in (1, 2, 4, 8) for n_nodes in (1, 2, 4)]
NODES = [(n_ranks, n_nodes) for n_ranks, n_nodes in NODES if n_ranks % n_nodes == 0]
ROUTINGS = ["uniform", "with_minus_one", "duplicates", "one_rank"]
OF_FOUR = cases.SMALL[4].replace(n_nodes=2)
VARIANTS = [
    OF_FOUR.replace(recv_capacity=20),
    OF_FOUR.replace(n_tokens=0, max_tokens=16),
    OF_FOUR.replace(token_format="blockwise_fp8", recv_capacity=60),
    OF_FOUR.replace(recv_capacity=40, **cases.FLAGS["shared"]),
    OF_FOUR.replace(combine_dtype="float32", **cases.FLAGS["shared"]),
    OF_FOUR.replace(**cases.FLAGS["skip_a2a"]),
    OF_FOUR.replace(**cases.FLAGS["both"]),
    OF_FOUR.replace(combine_dtype="float16", **cases.FLAGS["both"]),
    OF_FOUR.replace(combine_dtype="float16", **cases.FLAGS["shared"]),
    OF_FOUR.replace(combine_dtype="float16", recv_capacity=5, **cases.FLAGS["shared"]),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("n_ranks", "n_nodes"), NODES)
def test_sums_do_not_depend_on_where_weights_are_given(n_ranks, n_nodes, dtype, transport):
    case = cases.SMALL[n_ranks].replace(n_nodes=n_nodes, combine_dtype=dtype)
    for routing in ROUTINGS:
        check_sums(case.replace(routing=routing), transport)


@pytest.mark.thorough
@pytest.mark.parametrize("case", params(VARIANTS))
def test_drops_shared_experts_and_empty_calls_change_nothing(case, transport):
    skip_if_xla_crashes(case)
    for routing in ROUTINGS:
        check_sums(case.replace(routing=routing), transport)


def test_sums_on_several_nodes_are_other_sums():
    """So the tests above compare what differs."""
    inputs = suite.make_inputs(cases.SMALL[8])
    outs = [
        oracle.combine(inputs.routed, inputs.expert_out, n_nodes=n_nodes) for n_nodes in (1, 2, 4)
    ]
    for i, one in enumerate(outs):
        for other in outs[:i]:
            assert np.mean(np.stack(one) != np.stack(other)) > 0.01


@pytest.mark.parametrize("by_nodes", [False, True])
@pytest.mark.parametrize("flags", [{}, cases.FLAGS["shared"]], ids=["plain", "shared"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_operands_are_rounded_where_they_are_computed(dtype, flags, by_nodes, transport):
    """XLA may leave out the rounding of a number that the same program converts back."""
    case = cases.SMALL[4].replace(
        token_dtype=dtype, combine_dtype=dtype, n_nodes=2, weights="row", **flags
    )
    with each_node_by_itself(by_nodes):
        group = group_of(case, transport)
        mesh, inputs = group.mesh, suite.make_inputs(case)

    def operands(tokens, topk_ids, topk_weights, factors):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        return rows.tokens * factors[:1], tokens * factors

    def combine(tokens, topk_ids, topk_weights, expert_out, residual):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        return jax_ep.combine(group, expert_out, rows, residual=residual)

    def fused(*arrays):
        return combine(*arrays[:3], *operands(*arrays))

    weights = [np.nan_to_num(each) for each in inputs.topk_weights]
    arrays = put(mesh, inputs.tokens, inputs.topk_ids, weights, inputs.residual)
    stored = on_mesh(mesh, operands)(*arrays)
    wanted = on_mesh(mesh, combine)(*arrays[:3], *stored)
    assert_trees_equal(mesh, on_mesh(mesh, fused)(*arrays), wanted, case.name)


SIGNS = np.array([1, 1, -1], np.float32)  # of a token's rows
LARGE = 40000  # the sum of the first two is beyond float16's range


@pytest.mark.parametrize(
    ("n_ranks", "n_nodes", "by_nodes"), [(1, 1, 0), (2, 1, 0), (4, 2, 0), (4, 2, 1)]
)
@pytest.mark.parametrize("token_format", ["plain", "blockwise_fp8"])
def test_a_part_of_a_float16_sum_may_exceed_its_range(
    token_format, n_ranks, n_nodes, by_nodes, transport
):
    """On however many ranks and nodes the parts are, in combine and in all gradients."""
    case = cases.Case(
        n_ranks=n_ranks, n_experts=4, top_k=3, hidden_size=128, max_tokens=4, n_nodes=n_nodes
    )
    case = case.replace(token_format=token_format, combine_dtype="float16")
    case = case.replace(token_dtype="float16" if token_format == "plain" else "bfloat16")
    with each_node_by_itself(bool(by_nodes)):
        group = group_of(case, transport)
    half = jnp.float16
    ids, signs = jnp.tile(jnp.arange(3), (4, 1)), jnp.tile(jnp.asarray(SIGNS), (4, 1))

    def body(values):
        def rows_of(tokens):
            return jax_ep.dequantize(jax_ep.dispatch(group, tokens, ids), half)

        tokens = values.astype(case.token_dtype)
        plain, pull_rows = jax_ep.dispatch(group, tokens, ids), jax.vjp(rows_of, tokens)[1]
        weighted = jax_ep.dispatch(group, tokens, ids, signs)
        large, k = jnp.full(plain.src_info.shape[:1], LARGE, half), plain.src_info[:, 1]
        signed = jnp.where(k == 2, -large, large)[:, None] * jnp.ones((1, 128), half)
        equal = large[:, None] * jnp.ones((1, 128), half)
        _, pull_values = jax.vjp(lambda x: jax_ep.redispatch(group, x, plain), values)
        two = jax_ep.combine(group, equal, plain, jnp.where(ids < 2, signs, 0), residual=-values)
        in_flight = jax_ep.combine_async(group, signed, plain)
        return {
            "without weights": jax_ep.combine(group, signed, plain),
            "weights at combine": jax_ep.combine(group, equal, plain, signs),
            "weights at dispatch": jax_ep.combine(group, equal, weighted),
            "residual": two,
            "async": jax_ep.combine_wait(group, in_flight),
            "backward of dispatch": pull_rows(signed)[0],
            "backward of redispatch": pull_values(signed)[0],
            "beyond the range": jax_ep.combine(group, equal, plain),
        }

    values = np.full((4, 128), LARGE, np.float16)
    out = on_mesh(group.mesh, body)(*put(group.mesh, [values] * n_ranks))
    for (_, rank), results in shards(group.mesh, out):
        assert np.isposinf(results.pop("beyond the range")).all()
        for name, got in results.items():
            wanted = values.astype(got.dtype)
            assert_same_bits(got, wanted, f"{name}, {transport}, rank {rank}")
