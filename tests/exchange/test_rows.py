"""Facts of `Dispatched` about each row: its expert, and the rank that its token is from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import (
    AXIS,
    assert_same_bits,
    group_of,
    make_mesh,
    n_replicas,
    on_mesh,
    put,
    put_replicas,
    shards,
    skip_if_xla_crashes,
)

CASES = {
    "4 ranks": cases.SMALL[4],
    "1 rank": cases.SMALL[1],
    "8 ranks of 1 expert": cases.Case(n_ranks=8, n_experts=8, top_k=3, max_tokens=5),
    "rows are dropped": cases.SMALL[4].replace(recv_capacity=20),
    "shared": cases.SMALL[4].replace(**cases.FLAGS["shared"]),
    "skip_a2a": cases.SMALL[4].replace(n_tokens=13, **cases.FLAGS["skip_a2a"]),
    "both": cases.SMALL[4].replace(n_tokens=13, **cases.FLAGS["both"]),
    "padded": cases.QUANTIZED_SMALL["blockwise_fp8"],
    "padded and dropped": cases.FLAGS_QUANTIZED[1],
    "no tokens": cases.FLAGS_EDGE[2],
}


@functools.cache
def compiled(case, transport, dp):
    group = group_of(case, transport, make_mesh(case.n_ranks, dp))

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return rows.row_expert_ids, rows.row_source_ranks

    return group, on_mesh(group.mesh, body, keep_unused=True)


def expected(routed, rank) -> tuple[np.ndarray, np.ndarray]:
    """Of all C rows, from the oracle's (source rank, token, k) of each row in use."""
    offsets, rows = routed.row_offsets[rank], routed.rows[rank]
    n_groups = len(offsets) - 1
    experts = np.full(routed.n_rows, n_groups, np.int32)
    sources = np.full(routed.n_rows, -1, np.int32)
    for group in range(n_groups):
        experts[offsets[group] : offsets[group + 1]] = group
    sources[: len(rows)] = rows[:, 0]
    return experts, sources


def check(case, transport, dp=1) -> None:
    group, run = compiled(case.replace(routing="uniform", seed=0), transport, dp)
    inputs = [suite.make_inputs(case, None, r) for r in range(n_replicas(group.mesh))]
    operands = [[getattr(each, name) for each in inputs] for name in ("tokens", "topk_ids")]
    out = run(*(put_replicas(group.mesh, operand) for operand in operands))
    for (replica, rank), (experts, sources) in shards(group.mesh, out):
        wanted = expected(inputs[replica].routed, rank)
        what = f"{case.name}, replica {replica}, rank {rank}"
        assert_same_bits(experts, wanted[0], f"row_expert_ids, {what}")
        assert_same_bits(sources, wanted[1], f"row_source_ranks, {what}")


@pytest.mark.xla_collectives
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_described_with_every_routing(name, transport):
    skip_if_xla_crashes(CASES[name])
    for case in cases.every_routing(CASES[name]):
        check(case, transport)


@pytest.mark.xla_collectives
def test_every_replica_describes_its_own_rows(transport):
    check(cases.SMALL[4].replace(routing="zipf"), transport, dp=2)


@pytest.mark.xla_collectives
def test_a_row_is_the_token_that_its_labels_name(transport):
    """(source rank, token index) leads back to the row's numbers."""
    case = cases.SMALL[4].replace(routing="duplicates")
    group, inputs = group_of(case, transport), suite.make_inputs(case)

    def body(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return rows.tokens, rows.row_source_ranks, rows.src_info, rows.row_offsets

    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    all_tokens = np.stack(inputs.tokens)
    for _, (tokens, ranks, src_info, offsets) in shards(group.mesh, out):
        used = slice(int(offsets[-1]))
        wanted = all_tokens[ranks[used], src_info[used, 0]]
        assert_same_bits(tokens[used], wanted, "tokens")


def test_a_bias_per_expert_has_the_gradient_of_its_rows_only(transport):
    """Though the cotangents of unused rows may be NaN."""
    case = cases.SMALL[4].replace(routing="zipf", token_dtype="float32", combine_dtype="float32")
    group, inputs = group_of(case, transport), suite.make_inputs(case)
    n_local, hidden_size = case.n_experts // case.n_ranks, case.hidden_size

    def body(tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids)

        def loss(bias):
            results = rows.tokens + bias[rows.row_expert_ids]
            out = jax_ep.combine(group, results, rows, topk_weights)
            return jnp.sum(out)

        def poisoned(bias):
            each = bias[rows.row_expert_ids]
            used = suite.clear_unused(jnp.ones_like(each), rows.row_offsets)
            return jnp.sum(each * jnp.where(used > 0, 1, jnp.nan))

        bias = jax.lax.pcast(jnp.ones((n_local, hidden_size)), AXIS, to="varying")
        n_rows = rows.group_sizes.astype(jnp.float32)
        return jax.grad(loss)(bias), jax.grad(poisoned)(bias)[:, 0], n_rows

    arrays = inputs.tokens, inputs.topk_ids, [np.nan_to_num(w) for w in inputs.topk_weights]
    out = on_mesh(group.mesh, body)(*put(group.mesh, *arrays))
    for (_, rank), (grad, n_rows, wanted_n_rows) in shards(group.mesh, out):
        wanted = np.zeros((n_local, hidden_size), np.float32)
        for ids, weights in zip(inputs.topk_ids, arrays[2], strict=True):
            for expert in range(n_local):
                wanted[expert] += weights[ids == rank * n_local + expert].sum()
        np.testing.assert_allclose(grad, wanted, rtol=1e-5)
        np.testing.assert_array_equal(n_rows, wanted_n_rows)


@pytest.mark.xla_collectives
def test_unused_labels_cost_nothing(transport):
    """A program that does not read them is the same as ever."""
    group = group_of(cases.SMALL[4], transport)

    def body(reads, tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return rows.tokens, rows.row_source_ranks if reads else rows.row_offsets

    operands = put(group.mesh, *suite.make_inputs(cases.SMALL[4]).arrays()[:2])
    texts = [
        on_mesh(group.mesh, functools.partial(body, reads)).lower(*operands).as_text()
        for reads in (False, True)
    ]
    exchanges = "stablehlo.all_to_all", "@jax_ep_exchange("
    assert [sum(map(text.count, exchanges)) for text in texts] == [0, 1]


@pytest.mark.thorough
@pytest.mark.usefixtures("one_process")
def test_source_ranks_outside_shard_map_raise():
    group = group_of(cases.SMALL[2], "xla")
    spec = jax.P("ep")

    @functools.partial(jax.shard_map, mesh=group.mesh, in_specs=spec, out_specs=spec)
    def dispatch(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jax.tree.map(lambda x: x[None], rows)

    tokens, ids = (np.concatenate(x) for x in suite.make_inputs(cases.SMALL[2]).arrays()[:2])
    rows = dispatch(tokens, ids)
    with pytest.raises(ValueError, match="row_source_ranks must be called inside jax.shard_map"):
        rows.row_source_ranks  # noqa: B018
