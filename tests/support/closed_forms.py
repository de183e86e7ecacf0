"""Gradients of dispatch and combine by their closed forms, and of a layer against a dense one."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np

import cases
import jax_ep
import oracle
import suite
from harness import (
    assert_same_bits,
    assert_trees_equal,
    config_of,
    group_of,
    make_mesh,
    on_mesh,
    put,
    put_replicas,
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
    """Compares bitwise, or within rounding where JAX chose the order of the sums."""
    assert actual.dtype == expected.dtype, what
    if transport == "xla":
        assert_close(actual, expected, expected.dtype, what)
    else:
        assert_same_bits(actual, expected, what)


@functools.cache
def compiled_vjps(case, transport, check_vma):
    """The mesh, and the jitted vector-Jacobian products of dispatch and of combine."""
    group, weights = group_of(case, transport), case.weights

    def body(tokens, topk_ids, topk_weights, expert_out, residual, d_rows, d_row_weights):
        def rows(tokens, topk_weights):
            if weights == "row":
                dispatched = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
                return dispatched.tokens, dispatched.row_weights
            return jax_ep.dispatch(group, tokens, topk_ids).tokens, topk_weights

        def combined(topk_weights, expert_out, residual):
            at_row, at_source = suite.weights_for(weights, topk_weights)
            dispatched = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
            out = jax_ep.combine(group, expert_out, dispatched, *at_source, residual=residual)
            return out, dispatched.row_offsets

        _, pull = jax.vjp(rows, tokens, topk_weights)
        d_sent = d_row_weights if weights == "row" else jnp.zeros_like(topk_weights)
        d_tokens, d_sent_weights = pull((d_rows, d_sent))
        operands = topk_weights, expert_out, residual
        _, pull, row_offsets = jax.vjp(combined, *operands, has_aux=True)
        d_weights, d_expert_out, d_residual = pull(residual)
        return {
            "d_tokens": d_tokens,
            "d_sent_weights": d_sent_weights,
            "d_weights": d_weights,
            "d_expert_out": suite.clear_unused(d_expert_out, row_offsets),
            "d_residual": d_residual,
        }

    return group.mesh, on_mesh(group.mesh, body, check_vma=check_vma)


def gradients(case, transport, check_vma=True):
    """Runs the products; the cotangents of undefined rows are NaN.

    The cotangent of combine's result is the residual, which serves as well as any other array.
    """
    inputs = suite.make_inputs(case)
    token_case = case.replace(combine_dtype=case.token_dtype, seed=case.seed + 1)
    d_rows = suite.make_inputs(token_case, np.stack(inputs.topk_ids)).expert_out
    d_row_weights = [rows[:, 0].astype(np.float32) for rows in d_rows]
    program_case = case.replace(routing="uniform", seed=0)  # the routing changes no program
    mesh, vjps = compiled_vjps(program_case, transport, check_vma)
    out = vjps(*put(mesh, *inputs.arrays(), d_rows, d_row_weights))
    return inputs, d_rows, d_row_weights, dict(shards(mesh, out))


def check_gradients_match_their_closed_forms(weights, capacity, check_vma, transport):
    case = cases.SMALL[4].replace(weights=weights, recv_capacity=capacity)
    for routing in ROUTINGS:
        check_closed_forms(case.replace(routing=routing), transport, check_vma)


def check_closed_forms(case, transport, check_vma=True) -> None:
    inputs, d_rows, d_row_weights, out = gradients(case, transport, check_vma)
    d_tokens, d_sent = oracle.dispatch_grad(inputs.routed, d_rows, d_row_weights, case.n_nodes)
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


def check_gradients_of_unreduced_rows_return_to_their_rows(transport):
    case = cases.SMALL[4].replace(weights="none", routing="with_minus_one")
    group, inputs, d_out = group_of(case, transport), *unreduced_inputs(case)

    def body(tokens, topk_ids, expert_out, d_out):
        return unreduced_vjp(group, tokens, topk_ids, expert_out, d_out)[1]

    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, inputs.expert_out, d_out)
    got = on_mesh(group.mesh, body)(*operands)
    wanted, _ = oracle.combine_grad(inputs.routed, inputs.expert_out, d_out)
    for (_, rank), d_expert_out in shards(group.mesh, got):
        assert_same_bits(d_expert_out, wanted[rank], f"rank {rank}")


def unreduced_inputs(case) -> tuple[suite.Inputs, list]:
    """Inputs, and the cotangents of the rows of every choice."""
    shape = (case.n_ranks, case.n_tokens, case.top_k, case.hidden_size)
    d_out = np.random.default_rng(0).standard_normal(shape).astype(case.combine_dtype)
    return suite.make_inputs(case), list(d_out)


def unreduced_vjp(group, tokens, topk_ids, expert_out, d_out):
    """The result of combine without `reduce`, and its gradient in `expert_out`."""
    dispatched = jax_ep.dispatch(group, tokens, topk_ids)
    combine = functools.partial(jax_ep.combine, group, dispatched=dispatched, reduce=False)
    out, pull = jax.vjp(lambda rows: combine(rows), expert_out)
    return out, suite.clear_unused(pull(d_out)[0], dispatched.row_offsets)


def layer(group, weights: str):
    """A per-rank MoE layer whose experts scale their rows; with a residual."""

    def body(tokens, topk_ids, topk_weights, scale):
        at_row, at_source = suite.weights_for(weights, topk_weights)
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
        rank = jax.lax.axis_index(group.axis_name)
        experts = rank * group.n_local_experts + dispatched.expert_ids
        row = jnp.arange(dispatched.tokens.shape[0], dtype=jnp.uint32)
        which = jnp.searchsorted(dispatched.row_offsets[1:], row, side="right")
        row_scale = scale[experts][jnp.minimum(which, len(experts) - 1)]
        # Before the experts and after: a NaN in an unused row of the tokens, or of the cotangents,
        # would reach d scale as NaN * 0.
        rows = suite.clear_unused(dispatched.tokens, dispatched.row_offsets)
        rows = suite.clear_unused(jnp.tanh(rows * row_scale[:, None]), dispatched.row_offsets)
        return jax_ep.combine(group, rows, dispatched, *at_source, residual=tokens)

    return body


def dense_layer(tokens, topk_ids, topk_weights, scale, weights: str):
    """The layer without expert parallelism: the experts are where the tokens are."""
    valid = (topk_ids >= 0) & (topk_ids < len(scale))
    used_scale = scale[jnp.where(valid, topk_ids, 0)]
    rows = jnp.tanh(tokens[..., None, :] * used_scale[..., None])
    weight = topk_weights if weights != "none" else jnp.ones_like(topk_weights)
    weight = jnp.where(valid, weight, 0)
    return tokens + jnp.sum(weight[..., None] * rows, axis=-2)


def float32_layer(weights, transport, dp=1, check_vma=True):
    """(a layer over the mesh of tokens, weights and scale; its operands; the ids)."""
    dtypes = {"token_dtype": "float32", "combine_dtype": "float32"}
    case = cases.SMALL[4].replace(routing="with_minus_one", hidden_size=16, max_tokens=4, **dtypes)
    mesh = make_mesh(4, dp)
    group = jax_ep.ep_init(mesh, "ep", config_of(case), transport)
    inputs = [suite.make_inputs(case.replace(seed=replica)) for replica in range(dp)]
    ids = put_replicas(mesh, [each.topk_ids for each in inputs])
    tokens = put_replicas(mesh, [each.tokens for each in inputs])
    weight = put_replicas(mesh, [np.nan_to_num(each.topk_weights) for each in inputs])
    scale = jnp.linspace(0.5, 1.5, case.n_experts, dtype=jnp.float32)
    body, shard = layer(group, weights), jax.P(mesh.axis_names)

    def per_rank(tokens, ids, topk_weights, scale):
        return body(tokens[0], ids[0], topk_weights[0], scale)[None]

    mapped = jax.shard_map(
        per_rank,
        mesh=mesh,
        in_specs=(shard, shard, shard, jax.P()),
        out_specs=shard,
        check_vma=check_vma,
    )

    def global_layer(tokens, topk_weights, scale):
        return mapped(tokens, ids, topk_weights, scale)

    return jax.jit(global_layer), (tokens, weight, scale), ids


def check_gradients_of_a_layer_match_the_dense_layer(weights, dp, check_vma, transport):
    """A parameter that all ranks share gets the sum of all ranks' gradients."""
    moe, operands, ids = float32_layer(weights, transport, dp, check_vma)

    def gradients_of(layer):
        return jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.sin(layer(*xs))), argnums=(0, 1, 2)))

    got = gradients_of(moe)(*operands)
    *host, host_ids = (np.asarray(x) for x in (*operands, ids))
    wanted = gradients_of(lambda x, w, s: dense_layer(x, host_ids, w, s, weights))(*host)
    for name, one, other in zip(("tokens", "weights", "scale"), got, wanted, strict=True):
        assert_close(np.asarray(one), np.asarray(other), np.float32, f"d {name}")


def assert_equal(group, got, wanted, what: str) -> None:
    """Compares bitwise; on `xla`, within roundings to bfloat16, which XLA may leave out."""
    if group.transport != "xla":
        return assert_trees_equal(group.mesh, got, wanted, what)
    pairs = zip(shards(group.mesh, got), shards(group.mesh, wanted), strict=True)
    for (where, one), (_, other) in pairs:
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert x.dtype == y.dtype
            assert_close(x, y, jnp.bfloat16, f"{what}, {where}")
