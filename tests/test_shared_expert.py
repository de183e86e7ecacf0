"""`fused_shared_expert` and `skip_a2a`, apart and together: bits, and closed forms."""

from __future__ import annotations

import dataclasses

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
    config_of,
    make_mesh,
    on_mesh,
    params,
    place,
    shards,
    skip_if_xla_crashes,
)
from test_grad import assert_gradient, check_closed_forms, gradients


@pytest.mark.parametrize("case", params(cases.FLAGS_SMALL))
def test_every_routing_gives_the_oracles_bits(case, transport):
    mesh = make_mesh(4)
    for each in cases.every_routing(case):
        suite.check(each, transport, mesh)


@pytest.mark.parametrize("case", params(cases.FLAGS_ODD + cases.FLAGS_QUANTISED))
def test_odd_shapes_and_formats_give_the_oracles_bits(case, transport):
    skip_if_xla_crashes(case)
    mesh = make_mesh(case.n_ranks)
    for name in ("uniform", "out_of_range"):
        suite.check(case.but(routing=name), transport, mesh)


@pytest.mark.parametrize("flags", cases.FLAGS)
def test_halves_and_meshes_of_several_rows_give_the_oracles_bits(flags, transport):
    case = cases.SMALL[2].but(routing="zipf", **cases.FLAGS[flags])
    suite.check(case, transport, make_mesh(2, dp=2), split=True, check_vma=False)


@pytest.mark.parametrize("case", params(cases.FLAGS_SMALL))
def test_gradients_have_their_closed_forms(case, transport):
    for routing, capacity in (("out_of_range", None), ("duplicates", 20)):
        each = case.but(routing=routing, recv_capacity=capacity)
        inputs, d_rows, d_row_weights, out = gradients(each, transport)
        check_closed_forms(each, transport, inputs, d_rows, d_row_weights, out)


@pytest.mark.parametrize("case", params(cases.FLAGS_QUANTISED[1:3]))
def test_gradients_pass_dequantize(case, transport):
    """A token's gradient: its rows' in k order, then its shared row's, one cast."""
    group = jax_ep.ep_init(make_mesh(2), AXIS, config_of(case), transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids, d_rows):
        def rows(tokens):
            return jax_ep.dequantize(jax_ep.dispatch(group, tokens, topk_ids))

        return jax.vjp(rows, tokens)[1](d_rows)[0]

    operands = (inputs.tokens, inputs.topk_ids, inputs.expert_out)
    got = on_mesh(group.mesh, body)(*(place(group.mesh, [x]) for x in operands))
    wanted, _ = oracle.dispatch_grad(inputs.routed, inputs.expert_out)
    for (_, rank), d_tokens in shards(group.mesh, got):
        assert_gradient(transport, d_tokens, wanted[rank], f"rank {rank}")


def test_choices_apart_have_no_shared_rows_and_give_them_no_gradient(transport):
    case = cases.SMALL[4].but(weights="none", **cases.FLAGS["both"])
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case), transport)
    inputs = suite.make_inputs(case)
    shape = (case.n_ranks, case.n_tokens, case.top_k, case.hidden_size)
    d_out = np.random.default_rng(0).standard_normal(shape).astype(case.combine_dtype)

    def body(tokens, topk_ids, expert_out, d_out):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        out, pull = jax.vjp(
            lambda rows: jax_ep.combine(group, rows, dispatched, reduce=False),
            expert_out,
        )
        return out, pull(d_out)[0]

    operands = (inputs.tokens, inputs.topk_ids, inputs.expert_out, list(d_out))
    got = on_mesh(group.mesh, body)(*(place(group.mesh, [x]) for x in operands))
    wanted = oracle.combine(inputs.routed, inputs.expert_out, reduce=False)
    d_wanted, _ = oracle.combine_grad(inputs.routed, inputs.expert_out, list(d_out))
    for (_, rank), (out, d_expert_out) in shards(group.mesh, got):
        assert_same_bits(out, wanted[rank], f"rank {rank}")
        assert_same_bits(d_expert_out, d_wanted[rank], f"gradient of rank {rank}")


def test_a_shared_rows_weight_is_1_and_does_not_matter(transport):
    case = cases.SMALL[2].but(**cases.FLAGS["shared"])
    group = jax_ep.ep_init(make_mesh(2), AXIS, config_of(case), transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids, topk_weights):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        row = jnp.arange(group.max_recv_tokens, dtype=jnp.uint32)
        rows = jax_ep.dequantize(dispatched)  # without what is not in use

        def total(shared_weight):
            is_shared = row < dispatched.row_offsets[1]
            weights = jnp.where(is_shared, shared_weight, dispatched.row_weights)
            changed = dataclasses.replace(dispatched, row_weights=weights)
            out = jax_ep.combine(group, rows, changed)
            return jnp.sum(out.astype(jnp.float32))

        grads = [jax.value_and_grad(total)(jnp.float32(w)) for w in (1, 7)]
        return grads, dispatched.row_weights[: case.n_tokens]

    operands = (inputs.tokens, inputs.topk_ids, np.ones_like(inputs.topk_weights))
    got = on_mesh(group.mesh, body)(*(place(group.mesh, [x]) for x in operands))
    for _, (((value, grad), (other_value, other_grad)), weights) in shards(
        group.mesh, got
    ):
        assert (weights == 1).all()
        assert value == other_value
        assert grad == other_grad == 0


@pytest.mark.parametrize("weights_at", ["source", "row"])
def test_identity_experts_give_tokens_times_weights_and_the_token(
    weights_at, transport
):
    """Small integers and weights of 1, 2 and 4 keep every sum exact."""
    case = cases.SMALL[4].but(
        token_dtype="float32",
        combine_dtype="float32",
        routing="out_of_range",
        **cases.FLAGS["shared"],
    )
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case), transport)
    rng = np.random.default_rng(1)
    inputs = suite.make_inputs(case)
    tokens = [rng.integers(-8, 8, x.shape).astype(np.float32) for x in inputs.tokens]
    weights = [np.float32(2) ** rng.integers(0, 3, x.shape) for x in inputs.topk_ids]

    def body(tokens, topk_ids, topk_weights):
        at_row = (topk_weights,) if weights_at == "row" else ()
        at_source = (topk_weights,) if weights_at == "source" else ()
        rows = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
        return jax_ep.combine(group, rows.tokens, rows, *at_source, residual=tokens)

    operands = (tokens, inputs.topk_ids, [w.astype(np.float32) for w in weights])
    got = on_mesh(group.mesh, body)(*(place(group.mesh, [x]) for x in operands))
    for (_, rank), out in shards(group.mesh, got):
        ids = inputs.topk_ids[rank]
        valid = (ids >= 0) & (ids < case.n_experts)
        sums = (weights[rank] * valid).sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(out, tokens[rank] * (sums + 2))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("flags", ["skip_a2a", "both"])
def test_the_ranks_sums_are_the_dense_layer(flags, check_vma, transport):
    """As after tensor-parallel attention, gradients included; T is no multiple of R."""
    n_experts, n_tokens, size = 8, 10, 16
    mesh, has_shared = make_mesh(4), flags == "both"
    config = jax_ep.EPConfig(
        n_experts=n_experts,
        top_k=3,
        hidden_size=size,
        max_tokens_per_rank=n_tokens,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
        **cases.FLAGS[flags],
    )
    group = jax_ep.ep_init(mesh, AXIS, config, transport)
    keys = jax.random.split(jax.random.key(0), 4)
    tokens = jax.random.normal(keys[0], (n_tokens, size))
    weights, ids = jax.lax.top_k(jax.random.uniform(keys[1], (n_tokens, n_experts)), 3)
    experts = jax.random.normal(keys[2], (n_experts, size, size)) / 4
    shared = jax.random.normal(keys[3], (size, size)) / 4

    def per_rank(tokens, weights, shared, experts):
        rows = jax_ep.dispatch(group, tokens, ids)
        groups = jnp.concatenate([shared[None], experts]) if has_shared else experts
        hidden = jnp.tanh(jax.lax.ragged_dot(rows.tokens, groups, rows.group_sizes))
        out = jax_ep.combine(group, hidden, rows, weights)
        return jax.lax.psum(out, AXIS)

    def dense(tokens, weights, shared, experts):
        hidden = jnp.tanh(jnp.einsum("th,ehf->tef", tokens, experts))
        gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, n_experts))
        out = jnp.einsum("te,teh->th", gates, hidden)
        return out + jnp.tanh(tokens @ shared) if has_shared else out

    P = jax.P
    parallel = jax.shard_map(
        per_rank,
        mesh=mesh,
        in_specs=(P(), P(), P(), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )
    operands = (tokens, weights, shared, experts)

    def run(layer):
        def loss(*operands):
            return jnp.sum(jnp.sin(layer(*operands)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*operands)

    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-4, 1e-4),
        run(parallel),
        run(dense),
    )


def test_a_rank_that_holds_all_tokens_waits_for_nobody(transport):
    """One rank alone makes the calls."""
    case = cases.SMALL[4].but(**cases.FLAGS["both"])
    config = config_of(case, timeout_s=2.0)
    group = jax_ep.ep_init(make_mesh(4), AXIS, config, transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids):
        def layer():
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            return jax_ep.combine(group, rows.tokens, rows)

        rank = jax.lax.axis_index(AXIS)
        return jax.lax.cond(rank == 2, layer, lambda: jnp.zeros_like(tokens))

    operands = (inputs.tokens, inputs.topk_ids)
    out = on_mesh(group.mesh, body)(*(place(group.mesh, [x]) for x in operands))
    for (_, rank), array in shards(group.mesh, out):
        assert array.any() == (rank == 2)


@pytest.mark.parametrize("flags", cases.FLAGS)
def test_totals_are_the_experts(flags, transport):
    if transport == "xla":
        pytest.skip("xla keeps no totals")
    case = cases.SMALL[4].but(routing="out_of_range", **cases.FLAGS[flags])
    config = config_of(case, timeout_s=61.0)  # no other test's group
    inputs = suite.make_inputs(case)
    with jax_ep.ep_init(make_mesh(4), AXIS, config, transport) as group:

        def body(tokens, topk_ids):
            return suite.fields(jax_ep.dispatch(group, tokens, topk_ids))

        operands = (inputs.tokens, inputs.topk_ids)
        out = on_mesh(group.mesh, body)(*(place(group.mesh, [x]) for x in operands))
        jax.block_until_ready(out)
        totals = group.stats()
    routed, n_local = inputs.routed, case.n_experts // 4
    assert tuple(of_rank.rank for of_rank in totals) == group.ranks
    for of_rank in totals:
        rank = of_rank.rank
        sent = routed.places[rank][..., 0]
        to_rank = [(sent == r).any(axis=1).sum() for r in range(4)]
        if case.fused_shared_expert:
            to_rank[rank] = case.n_tokens
        ids = inputs.topk_ids[rank][sent >= 0]
        assert of_rank.invalid_ids == routed.n_invalid[rank] > 0
        np.testing.assert_array_equal(
            of_rank.tokens_to_rank, 0 if case.skip_a2a else to_rank
        )
        np.testing.assert_array_equal(
            of_rank.rows_to_expert, np.bincount(ids, minlength=case.n_experts)
        )
        sizes = np.diff(routed.row_offsets[rank].astype(int))
        np.testing.assert_array_equal(of_rank.rows_per_expert, sizes[-n_local:])
