"""`fused_shared_expert` and `skip_a2a`, each alone and both together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import suite
from closed_forms import assert_gradient, check_closed_forms, unreduced_inputs, unreduced_vjp
from harness import (
    AXIS,
    assert_same_bits,
    group_of,
    make_mesh,
    on_mesh,
    params,
    put,
    shards,
    skip_by_nodes,
    skip_if_xla_crashes,
)
from suite import totals_of_call


@pytest.mark.parametrize("case", params(cases.FLAGS_SMALL))
def test_every_routing_matches_the_oracle(case, transport):
    mesh = make_mesh(4)
    for each in cases.every_routing(case):
        suite.check(each, transport, mesh)


@pytest.mark.parametrize("case", params(cases.FLAGS_EDGE + cases.FLAGS_QUANTIZED))
def test_edge_cases_and_formats_match_the_oracle(case, transport):
    skip_if_xla_crashes(case)
    mesh = make_mesh(case.n_ranks)
    for name in ("uniform", "out_of_range"):
        suite.check(case.replace(routing=name), transport, mesh)


@pytest.mark.parametrize("flags", cases.FLAGS)
def test_asynchronous_calls_on_several_replicas_match_the_oracle(flags, transport):
    case = cases.SMALL[2].replace(routing="zipf", **cases.FLAGS[flags])
    suite.check(case, transport, make_mesh(2, dp=2), is_async=True, check_vma=False)


@pytest.mark.parametrize("case", params(cases.FLAGS_SMALL))
def test_gradients_match_their_closed_forms(case, transport):
    for routing, capacity in (("out_of_range", None), ("duplicates", 20)):
        check_closed_forms(case.replace(routing=routing, recv_capacity=capacity), transport)


@pytest.mark.parametrize("case", params(cases.FLAGS_QUANTIZED[1:3]))
def test_gradients_pass_through_dequantize(case, transport):
    """A token's gradient is the sum of its rows' in k order, then its shared row's, cast once."""
    group = group_of(case, transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids, d_rows):
        def rows(tokens):
            return jax_ep.dequantize(jax_ep.dispatch(group, tokens, topk_ids))

        return jax.vjp(rows, tokens)[1](d_rows)[0]

    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, inputs.expert_out)
    got = on_mesh(group.mesh, body)(*operands)
    wanted, _ = oracle.dispatch_grad(inputs.routed, inputs.expert_out, n_nodes=case.n_nodes)
    for (_, rank), d_tokens in shards(group.mesh, got):
        assert_gradient(transport, d_tokens, wanted[rank], f"rank {rank}")


def test_unreduced_choices_leave_out_shared_rows(transport):
    """Nor do shared rows get a gradient."""
    case = cases.SMALL[4].replace(weights="none", **cases.FLAGS["both"])
    group, (inputs, d_out) = group_of(case, transport), unreduced_inputs(case)

    def body(*operands):
        return unreduced_vjp(group, *operands)

    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, inputs.expert_out, d_out)
    got = on_mesh(group.mesh, body)(*operands)
    wanted = oracle.combine(inputs.routed, inputs.expert_out, reduce=False)
    d_wanted, _ = oracle.combine_grad(inputs.routed, inputs.expert_out, d_out)
    for (_, rank), (out, d_expert_out) in shards(group.mesh, got):
        assert_same_bits(out, wanted[rank], f"rank {rank}")
        assert_same_bits(d_expert_out, d_wanted[rank], f"gradient of rank {rank}")


def test_a_shared_row_has_weight_1_which_combine_ignores(transport):
    case = cases.SMALL[2].replace(**cases.FLAGS["shared"])
    group = group_of(case, transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids, topk_weights):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        row = jnp.arange(group.max_recv_tokens, dtype=jnp.uint32)
        rows = jax_ep.dequantize(dispatched)  # unused rows are zero

        def total(shared_weight):
            is_shared = row < dispatched.row_offsets[1]
            weights = jnp.where(is_shared, shared_weight, dispatched.row_weights)
            changed = dataclasses.replace(dispatched, row_weights=weights)
            out = jax_ep.combine(group, rows, changed)
            return jnp.sum(out.astype(jnp.float32))

        grads = [jax.value_and_grad(total)(jnp.float32(w)) for w in (1, 7)]
        return grads, dispatched.row_weights[: case.n_tokens]

    ones = np.ones_like(inputs.topk_weights)
    got = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids, ones))
    for _, (((value, grad), (other_value, other_grad)), weights) in shards(group.mesh, got):
        assert (weights == 1).all()
        assert value == other_value
        assert grad == other_grad == 0


@pytest.mark.parametrize("weights_at", ["source", "row"])
def test_identity_experts_return_tokens_times_weights_plus_the_token(weights_at, transport):
    """Small integers and weights of 1, 2 and 4 keep every sum exact."""
    dtypes = {"token_dtype": "float32", "combine_dtype": "float32"}
    case = cases.SMALL[4].replace(routing="out_of_range", **dtypes, **cases.FLAGS["shared"])
    group = group_of(case, transport)
    rng = np.random.default_rng(1)
    inputs = suite.make_inputs(case)
    tokens = [rng.integers(-8, 8, x.shape).astype(np.float32) for x in inputs.tokens]
    weights = [np.float32(2) ** rng.integers(0, 3, x.shape) for x in inputs.topk_ids]

    def body(tokens, topk_ids, topk_weights):
        at_row, at_source = suite.weights_for(weights_at, topk_weights)
        rows = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
        return jax_ep.combine(group, rows.tokens, rows, *at_source, residual=tokens)

    float_weights = [w.astype(np.float32) for w in weights]
    got = on_mesh(group.mesh, body)(*put(group.mesh, tokens, inputs.topk_ids, float_weights))
    for (_, rank), out in shards(group.mesh, got):
        ids = inputs.topk_ids[rank]
        valid = (ids >= 0) & (ids < case.n_experts)
        sums = (weights[rank] * valid).sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(out, tokens[rank] * (sums + 2))


class TensorParallelLayer:
    """A layer after tensor-parallel attention, and the dense layer that it must equal."""

    n_experts, n_tokens, size = 8, 10, 16  # T is not a multiple of R

    def __init__(self, flags: str, check_vma: bool, transport: str) -> None:
        mesh, P = make_mesh(4), jax.P
        config = jax_ep.EPConfig(
            n_experts=self.n_experts,
            top_k=3,
            hidden_size=self.size,
            max_tokens_per_rank=self.n_tokens,
            token_format=jax_ep.Plain(jnp.float32),
            combine_dtype=jnp.float32,
            **cases.FLAGS[flags],
        )
        self.group = jax_ep.ep_init(mesh, AXIS, config, transport)
        self.has_shared = config.fused_shared_expert
        keys = jax.random.split(jax.random.key(0), 4)
        scores = jax.random.uniform(keys[1], (self.n_tokens, self.n_experts))
        weights, self.ids = jax.lax.top_k(scores, 3)
        tokens = jax.random.normal(keys[0], (self.n_tokens, self.size))
        experts = jax.random.normal(keys[2], (self.n_experts, self.size, self.size)) / 4
        shared = jax.random.normal(keys[3], (self.size, self.size)) / 4
        self.operands = (tokens, weights, shared, experts)
        self.parallel = jax.shard_map(
            self._per_rank,
            mesh=mesh,
            in_specs=(P(), P(), P(), P(AXIS)),
            out_specs=P(),
            check_vma=check_vma,
        )

    def _per_rank(self, tokens, weights, shared, experts):
        rows = jax_ep.dispatch(self.group, tokens, self.ids)
        groups = jnp.concatenate([shared[None], experts]) if self.has_shared else experts
        hidden = jnp.tanh(jax.lax.ragged_dot(rows.tokens, groups, rows.group_sizes))
        out = jax_ep.combine(self.group, hidden, rows, weights)
        return jax.lax.psum(out, AXIS)

    def dense(self, tokens, weights, shared, experts):
        hidden = jnp.tanh(jnp.einsum("th,ehf->tef", tokens, experts))
        gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(self.ids, self.n_experts))
        out = jnp.einsum("te,teh->th", gates, hidden)
        return out + jnp.tanh(tokens @ shared) if self.has_shared else out


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("flags", ["skip_a2a", "both"])
def test_the_ranks_sums_are_the_dense_layer(flags, check_vma, transport):
    """As after tensor-parallel attention, gradients included."""
    layer = TensorParallelLayer(flags, check_vma, transport)

    def run(function):
        def loss(*operands):
            return jnp.sum(jnp.sin(function(*operands)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*layer.operands)

    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-4, 1e-4),
        run(layer.parallel),
        run(layer.dense),
    )


def test_with_skip_a2a_a_rank_waits_for_no_other(transport):
    """One rank alone makes the calls."""
    case = cases.SMALL[4].replace(**cases.FLAGS["both"])
    group = group_of(case, transport, timeout_s=2.0)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids):
        def layer():
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            return jax_ep.combine(group, rows.tokens, rows)

        rank = jax.lax.axis_index(AXIS)
        return jax.lax.cond(rank == 2, layer, lambda: jnp.zeros_like(tokens))

    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for (_, rank), array in shards(group.mesh, out):
        assert array.any() == (rank == 2)


@pytest.mark.parametrize("flags", cases.FLAGS)
def test_stats_count_the_rows_of_experts_only(flags, transport):
    if transport == "xla":
        pytest.skip("xla keeps no totals")
    skip_by_nodes()
    case = cases.SMALL[4].replace(routing="out_of_range", **cases.FLAGS[flags])
    inputs, n_local = suite.make_inputs(case), case.n_experts // 4
    with group_of(case, transport, timeout_s=61.0) as group:  # no other test's group

        def body(tokens, topk_ids):
            return suite.fields(jax_ep.dispatch(group, tokens, topk_ids))

        operands = put(group.mesh, inputs.tokens, inputs.topk_ids)
        jax.block_until_ready(on_mesh(group.mesh, body)(*operands))
        stats = group.stats()
    assert tuple(totals.rank for totals in stats) == group.ranks
    for totals in stats:
        rank = totals.rank
        expected = totals_of_call(case, inputs, rank)
        to_rank = expected["tokens_to_rank"]
        if case.fused_shared_expert:
            to_rank[rank] = case.n_tokens
        has_row = inputs.routed.destinations[rank][..., 0] >= 0
        ids = inputs.topk_ids[rank][has_row]
        assert totals.invalid_ids == expected["invalid_ids"] > 0
        for got, wanted in (
            (totals.tokens_to_rank, 0 if case.skip_a2a else to_rank),
            (totals.rows_to_expert, np.bincount(ids, minlength=case.n_experts)),
            (totals.rows_per_expert, expected["rows_per_expert"][-n_local:]),
        ):
            np.testing.assert_array_equal(got, wanted)
