"""Gradients: closed forms in bits, finite differences, and JAX's own autodiff.

The contract fixes the arithmetic of the backward passes, so d_tokens, d_expert_out and
d_residual are compared in bits on the transports that have their own; `xla` is
differentiated by JAX, which may add in another order, and is compared within rounding.
The cotangent of a weight is a sum over H in no fixed order on any transport.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jax.test_util
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
    place,
    shards,
)

MODES = ["none", "source", "row"]
ROUTINGS = ["uniform", "with_minus_one", "out_of_range", "duplicates", "nothing"]
CAPACITIES = [None, 20]


def assert_close(actual, expected, dtype, what: str) -> None:
    """Allows a few roundings of `dtype`, relative to the largest element."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, what
    scale = max(1.0, np.abs(expected).max(initial=0))
    tolerance = 8 * float(jnp.finfo(dtype).eps) * scale
    np.testing.assert_allclose(actual, expected, 0, tolerance, err_msg=what)


def assert_gradient(transport, actual, expected, what: str) -> None:
    """Compares in bits, or within rounding where JAX chose the order of the sums."""
    assert actual.dtype == expected.dtype, what
    if transport == "xla":
        assert_close(actual, expected, expected.dtype, what)
    else:
        assert_same_bits(actual, expected, what)


@functools.cache
def compiled_vjps(mesh, config, transport, weights, check_vma):
    """Gives the jitted vector-Jacobian products of dispatch and of combine."""
    group = jax_ep.ep_init(mesh, AXIS, config, transport=transport)

    def body(tokens, topk_ids, topk_weights, expert_out, residual, d_rows, d_row_w):
        def rows(tokens, topk_weights):
            if weights == "row":
                dispatched = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
                return dispatched.tokens, dispatched.row_weights
            return jax_ep.dispatch(group, tokens, topk_ids).tokens, topk_weights

        def combined(topk_weights, expert_out, residual):
            at_row = (topk_weights,) if weights == "row" else ()
            at_source = (topk_weights,) if weights == "source" else ()
            dispatched = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
            return jax_ep.combine(
                group, expert_out, dispatched, *at_source, residual=residual
            )

        _, pull = jax.vjp(rows, tokens, topk_weights)
        d_tokens, d_sent = pull(
            (d_rows, d_row_w if weights == "row" else jnp.zeros_like(topk_weights))
        )
        _, pull = jax.vjp(combined, topk_weights, expert_out, residual)
        d_weights, d_expert_out, d_residual = pull(residual)
        return {
            "d_tokens": d_tokens,
            "d_sent_weights": d_sent,
            "d_weights": d_weights,
            "d_expert_out": d_expert_out,
            "d_residual": d_residual,
        }

    return on_mesh(mesh, body, check_vma=check_vma)


def gradients(case, transport, check_vma=True):
    """Runs the products, with NaN as cotangents of undefined rows.

    The cotangent of combine's result is the residual: it is as good as any other.
    """
    mesh = make_mesh(case.n_ranks)
    inputs = suite.make_inputs(case)
    token_case = case.but(combine_dtype=case.token_dtype, seed=case.seed + 1)
    d_rows = suite.make_inputs(token_case, np.stack(inputs.topk_ids)).expert_out
    d_row_weights = [rows[:, 0].astype(np.float32) for rows in d_rows]
    vjps = compiled_vjps(mesh, config_of(case), transport, case.weights, check_vma)
    operands = (*inputs.arrays(), d_rows, d_row_weights)
    out = vjps(*(place(mesh, [operand]) for operand in operands))
    return inputs, d_rows, d_row_weights, dict(shards(mesh, out))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("weights", MODES)
def test_gradients_have_their_closed_forms(weights, capacity, check_vma, transport):
    for routing in ROUTINGS:
        case = cases.SMALL[4].but(
            routing=routing, weights=weights, recv_capacity=capacity
        )
        inputs, d_rows, d_row_weights, out = gradients(case, transport, check_vma)
        check_closed_forms(case, transport, inputs, d_rows, d_row_weights, out)


@pytest.mark.parametrize("case", cases.FORMATS, ids=lambda case: case.name)
def test_gradients_have_their_closed_forms_in_every_format(case, transport):
    inputs, d_rows, d_row_weights, out = gradients(case, transport)
    check_closed_forms(case, transport, inputs, d_rows, d_row_weights, out)


def check_closed_forms(case, transport, inputs, d_rows, d_row_weights, out):
    d_tokens, d_sent = oracle.dispatch_grad(inputs.routed, d_rows, d_row_weights)
    d_expert_out, d_weights = oracle.combine_grad(
        inputs.routed,
        inputs.expert_out,
        inputs.residual,
        topk_weights=None if case.weights == "none" else inputs.topk_weights,
    )
    for (_, rank), got in out.items():
        what = f"{case.name} on {transport}, rank {rank}"
        assert_gradient(transport, got["d_tokens"], d_tokens[rank], what)
        assert_gradient(transport, got["d_expert_out"], d_expert_out[rank], what)
        assert_same_bits(got["d_residual"], inputs.residual[rank], what)
        if case.weights == "row":
            assert_same_bits(got["d_sent_weights"], d_sent[rank], what)
        if case.weights == "none":
            assert not got["d_weights"].any(), what
        else:
            assert got["d_weights"].dtype == np.float32
            assert_close(got["d_weights"], d_weights[rank], np.float32, what)


def test_gradients_without_a_sum_return_to_their_rows(transport):
    case = cases.SMALL[4].but(weights="none", routing="with_minus_one")
    mesh = make_mesh(4)
    group = jax_ep.ep_init(mesh, AXIS, config_of(case), transport=transport)
    inputs = suite.make_inputs(case)
    shape = (case.n_ranks, case.n_tokens, case.top_k, case.hidden_size)
    d_out = np.random.default_rng(0).standard_normal(shape).astype(case.combine_dtype)

    def body(tokens, topk_ids, expert_out, d_out):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        _, pull = jax.vjp(
            lambda rows: jax_ep.combine(group, rows, dispatched, reduce=False),
            expert_out,
        )
        return pull(d_out)[0]

    operands = (inputs.tokens, inputs.topk_ids, inputs.expert_out, list(d_out))
    got = on_mesh(mesh, body)(*(place(mesh, [x]) for x in operands))
    wanted, _ = oracle.combine_grad(inputs.routed, inputs.expert_out, list(d_out))
    for (_, rank), d_expert_out in shards(mesh, got):
        assert_same_bits(d_expert_out, wanted[rank], f"rank {rank}")


def layer(group, weights: str):
    """Gives a per-rank MoE layer whose experts scale their rows; residual included."""

    def body(tokens, topk_ids, topk_weights, scale):
        at_row = (topk_weights,) if weights == "row" else ()
        at_source = (topk_weights,) if weights == "source" else ()
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
        rank = jax.lax.axis_index(group.axis_name)
        experts = rank * group.n_local_experts + dispatched.expert_ids
        row = jnp.arange(dispatched.tokens.shape[0], dtype=jnp.uint32)
        which = jnp.searchsorted(dispatched.row_offsets[1:], row, side="right")
        row_scale = scale[experts][jnp.minimum(which, len(experts) - 1)]
        # Before the experts: a NaN in an unused row would reach d scale as NaN * 0.
        used = (row < dispatched.row_offsets[-1])[:, None]
        rows = jnp.where(used, dispatched.tokens, 0)
        rows = jnp.tanh(rows * row_scale[:, None])
        return jax_ep.combine(group, rows, dispatched, *at_source, residual=tokens)

    return body


def dense_layer(tokens, topk_ids, topk_weights, scale, weights: str):
    """The same layer without expert parallelism: every token sees its experts here."""
    valid = (topk_ids >= 0) & (topk_ids < len(scale))
    used_scale = scale[jnp.where(valid, topk_ids, 0)]
    rows = jnp.tanh(tokens[..., None, :] * used_scale[..., None])
    weight = topk_weights if weights != "none" else jnp.ones_like(topk_weights)
    weight = jnp.where(valid, weight, 0)
    return tokens + jnp.sum(weight[..., None] * rows, axis=-2)


def float32_layer(weights, transport, dp=1, check_vma=True):
    """Gives (global layer of tokens, weights, scale; the operands; the ids)."""
    case = cases.SMALL[4].but(
        token_dtype="float32",
        combine_dtype="float32",
        routing="with_minus_one",
        hidden_size=16,
        max_tokens=4,
    )
    mesh = make_mesh(4, dp)
    group = jax_ep.ep_init(mesh, AXIS, config_of(case), transport=transport)
    inputs = [suite.make_inputs(case.but(seed=g)) for g in range(dp)]
    ids = place(mesh, [each.topk_ids for each in inputs])
    tokens = place(mesh, [each.tokens for each in inputs])
    weight = place(mesh, [np.nan_to_num(each.topk_weights) for each in inputs])
    scale = np.linspace(0.5, 1.5, case.n_experts, dtype=np.float32)
    body = layer(group, weights)
    shard = jax.P(mesh.axis_names)

    def global_layer(tokens, topk_weights, scale):
        def per_rank(tokens, ids, topk_weights, scale):
            return body(tokens[0], ids[0], topk_weights[0], scale)[None]

        return jax.shard_map(
            per_rank,
            mesh=mesh,
            in_specs=(shard, shard, shard, jax.P()),
            out_specs=shard,
            check_vma=check_vma,
        )(tokens, ids, topk_weights, scale)

    return jax.jit(global_layer), (tokens, weight, jnp.asarray(scale)), ids


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("weights", MODES)
def test_a_layers_gradients_are_the_dense_layers(weights, dp, check_vma, transport):
    """A parameter that all ranks share gets the sum of all ranks' gradients."""
    moe, operands, ids = float32_layer(weights, transport, dp, check_vma)

    def loss(out):
        return jnp.sum(jnp.sin(out))

    got = jax.jit(jax.grad(lambda *xs: loss(moe(*xs)), argnums=(0, 1, 2)))(*operands)
    host = [np.asarray(x) for x in (*operands, ids)]
    wanted = jax.grad(
        lambda x, w, s: loss(dense_layer(x, host[3], w, s, weights)), argnums=(0, 1, 2)
    )(*(jnp.asarray(x) for x in host[:3]))
    for name, one, other in zip(
        ("tokens", "weights", "scale"), got, wanted, strict=True
    ):
        assert_close(np.asarray(one), np.asarray(other), np.float32, f"d {name}")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("weights", MODES)
def test_finite_differences_agree(weights, transport):
    """In float32, where eps = 2^-6 keeps both errors of the difference under 1e-3."""
    moe, operands, _ = float32_layer(weights, transport)
    jax.test_util.check_grads(
        moe, operands, order=1, modes=["rev"], atol=3e-3, rtol=3e-3, eps=2**-6
    )


@pytest.mark.parametrize("weights", MODES)
def test_gradients_repeat_themselves_in_bits(weights, transport):
    case = cases.SMALL[4].but(weights=weights, routing="duplicates")
    first, second = (gradients(case, transport)[-1] for _ in range(2))
    for where, results in first.items():
        for name, array in results.items():
            assert_same_bits(second[where][name], array, f"{name} of {where}")


@pytest.mark.xla_collectives
@pytest.mark.parametrize("weights", MODES)
def test_gradients_equal_the_xla_transports_own(weights, transport):
    if transport == "xla":
        pytest.skip("compares the other transports with this one")
    case = cases.SMALL[4].but(weights=weights, routing="zipf")
    got, wanted = (gradients(case, name)[-1] for name in (transport, "xla"))
    for where, results in wanted.items():
        for name, array in results.items():
            assert_close(got[where][name], array, array.dtype, f"{name} of {where}")
