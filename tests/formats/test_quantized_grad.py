"""Gradients through quantized formats: straight through, bitwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import oracle_formats as formats
import suite
from closed_forms import assert_gradient, dense_layer
from harness import assert_same_bits, group_of, on_mesh, put, shards

NAMES = list(cases.QUANTIZED_SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["none", "row"])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_row_reaches_its_token(name, weights, transport):
    """The cotangents of unused rows and of padding rows are NaN."""
    case = cases.QUANTIZED_SMALL[name].replace(weights=weights, routing="with_minus_one")
    inputs = suite.make_inputs(case)
    group = group_of(case, transport)

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        def rows(tokens, topk_weights):
            at_row, _ = suite.weights_for(weights, topk_weights)
            return jax_ep.dequantize(jax_ep.dispatch(group, tokens, topk_ids, *at_row))

        values, pull = jax.vjp(rows, tokens, topk_weights)
        d_tokens, d_weights = pull(expert_out)
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        _, pull = jax.vjp(lambda rows: jax_ep.combine(group, rows, dispatched), expert_out)
        d_rows = suite.clear_unused(pull(residual)[0], dispatched.row_offsets)
        return values, d_tokens, d_weights, d_rows

    out = on_mesh(group.mesh, body)(*put(group.mesh, *inputs.arrays()))
    d_tokens, _ = oracle.dispatch_grad(inputs.routed, inputs.expert_out, n_nodes=case.n_nodes)
    d_expert_out, _ = oracle.combine_grad(inputs.routed, inputs.expert_out, inputs.residual)
    values = expected_values(case, inputs)
    for (_, rank), (rows, got_tokens, got_weights, got_rows) in shards(group.mesh, out):
        what = f"{case.name} on {transport}, rank {rank}"
        assert_same_bits(rows, values[rank], what)
        assert_gradient(transport, got_tokens, d_tokens[rank], what)
        assert not got_weights.any(), what
        assert_same_bits(got_rows, d_expert_out[rank], what)


def test_the_weights_of_padding_rows_have_no_gradient(transport):
    case = cases.QUANTIZED_SMALL["blockwise_fp8"].replace(weights="row", routing="with_minus_one")
    inputs = suite.make_inputs(case)
    group = group_of(case, transport)

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)

        def combined(row_weights):
            rows = dataclasses.replace(dispatched, row_weights=row_weights)
            return jax_ep.combine(group, expert_out, rows)

        return jax.vjp(combined, dispatched.row_weights)[1](residual)[0]

    # JAX, which differentiates xla, multiplies the cotangent of padding, zero, by the row.
    dtype = inputs.expert_out[0].dtype
    expert_out = [np.nan_to_num(np.float32(rows)).astype(dtype) for rows in inputs.expert_out]
    operands = inputs.tokens, inputs.topk_ids, inputs.topk_weights, expert_out, inputs.residual
    out = on_mesh(group.mesh, body)(*put(group.mesh, *operands))
    for (_, rank), d_weights in shards(group.mesh, out):
        is_padding = inputs.routed.rows[rank][:, 0] < 0
        used = d_weights[: len(is_padding)]
        assert is_padding.any() and not used[is_padding].any(), f"rank {rank}"
        assert used[~is_padding].all(), f"rank {rank}"


def test_a_layer_may_stop_the_gradient_at_a_quantized_activation(transport):
    """Weights still have a gradient, and so have tokens, past the activation."""
    case = cases.QUANTIZED_SMALL["mxfp8"].replace(weights="none")
    inputs = suite.make_inputs(case)
    group, activation_format = group_of(case, transport), jax_ep.MXFP8()

    def loss(stop, tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        x = jax_ep.dequantize(rows)
        acts = jax_ep.fused_silu(stop(x), rows.row_offsets, activation_format)
        operands = (acts.tokens, acts.scales, rows.row_offsets)
        numbers = activation_format.dequantize_rows(*operands)
        out = x + jnp.tile(numbers, 2).astype(x.dtype)
        out = jax_ep.combine(group, out, rows, topk_weights)
        return jnp.sum(out.astype(jnp.float32))

    def gradients(stop, *operands):
        grad = jax.grad(functools.partial(loss, stop), argnums=(0, 2))
        return on_mesh(group.mesh, grad)(*operands)

    weights = [np.nan_to_num(each) for each in inputs.topk_weights]
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, weights)
    for _, grads in shards(group.mesh, gradients(jax.lax.stop_gradient, *operands)):
        assert all(np.abs(each.astype(np.float32)).max() > 0.1 for each in grads)
    with pytest.raises(NotImplementedError, match="mxfp8 quantizes"):
        gradients(lambda x: x, *operands)


@pytest.mark.parametrize(
    ("name", "wrap", "zero_unused_rows"),
    [*((name, jax.jit, False) for name in cases.QUANTIZED_NAMES), ("mxfp8", jax.checkpoint, True)],
)
def test_a_gradient_that_reaches_codes_raises(name, wrap, zero_unused_rows, transport):
    """It would be dropped. `dequantize` beside them, or codes of a stopped gradient, may stay."""
    case = cases.QUANTIZED_SMALL[name].replace(weights="none")
    inputs = suite.make_inputs(case)
    group = group_of(case, transport, zero_unused_rows=zero_unused_rows)

    def gradient(stop):
        @wrap
        def loss(tokens, topk_ids):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            codes = stop((rows.tokens, rows.scales))
            numbers = [jnp.nan_to_num(x.astype(jnp.float32)).sum() for x in codes]
            return sum(numbers) * 0 + jax_ep.dequantize(rows).astype(jnp.float32).sum()

        return on_mesh(group.mesh, jax.grad(loss))

    operands = put(group.mesh, inputs.tokens, inputs.topk_ids)
    with pytest.raises(NotImplementedError, match="^dispatch: tokens and scales of its result"):
        gradient(lambda x: x)(*operands)
    for _, grad in shards(group.mesh, gradient(jax.lax.stop_gradient)(*operands)):
        assert np.abs(grad.astype(np.float32)).max() >= 1


def test_a_dispatch_in_a_loop_keeps_its_gradient(transport):
    """The zero cotangents that a loop makes reach no codes."""
    case = cases.QUANTIZED_SMALL["mxfp8"].replace(weights="none")
    inputs = suite.make_inputs(case)
    group = group_of(case, transport)

    def loss(tokens, topk_ids):
        def step(x, _):
            rows = jax_ep.dispatch(group, x, topk_ids)
            out = jax_ep.combine(group, jax_ep.dequantize(rows, jnp.bfloat16), rows)
            return out.astype(x.dtype), jnp.sum(out.astype(jnp.float32))

        x, sums = jax.lax.scan(step, tokens, None, length=2)
        return sums.sum() + x.astype(jnp.float32).sum()

    out = on_mesh(group.mesh, jax.grad(loss))(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for _, grad in shards(group.mesh, out):
        assert np.abs(grad.astype(np.float32)).max() >= 1


@pytest.mark.usefixtures("one_process")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="patches transport host")
def test_cotangents_that_travel_in_slices_give_the_same_bits(monkeypatch):
    """As on `p2p` for float32 tokens if experts return bfloat16."""
    case = cases.QUANTIZED_SMALL["mxfp8"].replace(token_dtype="float32")
    inputs = suite.make_inputs(case)
    group = group_of(case, "host")

    def body(tokens, topk_ids, cotangent):
        def rows(tokens):
            return jax_ep.dequantize(jax_ep.dispatch(group, tokens, topk_ids))

        return jax.vjp(rows, tokens)[1](cotangent)[0]

    cotangents = [np.nan_to_num(x).astype(np.float32) for x in inputs.expert_out]
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, cotangents)
    whole = on_mesh(group.mesh, body)(*operands)
    shapes = []

    def n_slices(rows):
        shapes.append(rows.shape)
        return 2

    monkeypatch.setattr(group._connection.calls, "n_slices", n_slices)
    in_slices = on_mesh(group.mesh, lambda *args: body(*args))(*operands)
    assert shapes
    assert np.asarray(whole).any()
    assert_same_bits(np.asarray(in_slices), np.asarray(whole), "two slices")


def expected_values(case, inputs) -> list[np.ndarray]:
    """The result of `dequantize`: bfloat16[C, H], zero in rows without a token."""
    quantized = [formats.quantize(case.token_format, x) for x in inputs.tokens]
    values = [formats.dequantize(case.token_format, each) for each in quantized]
    result = []
    for rows in inputs.routed.rows:
        array = np.zeros((inputs.routed.n_rows, case.hidden_size), np.float32)
        for row, (source, token, _) in enumerate(rows):
            if source >= 0:
                array[row] = values[source][token]
        result.append(array.astype(inputs.tokens[0].dtype))
    return result


def rounding_error(name: str, tokens: np.ndarray) -> np.ndarray:
    return formats.dequantize(name, formats.quantize(name, tokens)) - tokens


def moe_layer(group, check_vma: bool):
    """A layer over the mesh; `scale` is the same on all ranks."""
    shard = jax.P(group.axis_name)

    def per_rank(tokens, topk_ids, topk_weights, scale):
        tokens = tokens[0]
        dispatched = jax_ep.dispatch(group, tokens, topk_ids[0])
        rows = jax_ep.dequantize(dispatched)
        rank = jax.lax.axis_index(group.axis_name)
        row = jnp.arange(rows.shape[0], dtype=jnp.uint32)
        which = jnp.searchsorted(dispatched.row_offsets[1:], row, side="right")
        expert = jnp.minimum(which, group.n_local_experts - 1)
        used = scale[rank * group.n_local_experts + expert]
        rows = suite.clear_unused(jnp.tanh(rows * used[:, None]), dispatched.row_offsets)
        out = jax_ep.combine(group, rows, dispatched, topk_weights[0], residual=tokens)
        return out[None]

    return jax.shard_map(
        per_rank,
        mesh=group.mesh,
        in_specs=(shard, shard, shard, jax.P()),
        out_specs=shard,
        check_vma=check_vma,
    )


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_layer_match_simulated_quantization(name, check_vma, transport):
    dtypes = {"token_dtype": "float32", "combine_dtype": "float32"}
    sizes = {"hidden_size": 128, "max_tokens": 6}
    case = cases.QUANTIZED_SMALL[name].replace(routing="with_minus_one", **dtypes, **sizes)
    moe = moe_layer(group_of(case, transport), check_vma)
    inputs = suite.make_inputs(case)
    tokens, ids = np.stack(inputs.tokens), np.stack(inputs.topk_ids)
    weights = np.nan_to_num(np.stack(inputs.topk_weights))
    scale = np.linspace(0.5, 1.5, case.n_experts, dtype=np.float32)
    # Straight through: the rounding error is a constant. The residual has none.
    error = rounding_error(name, tokens)

    def simulated(tokens, ids, weights, scale):
        return dense_layer(tokens + error, ids, weights, scale, "source") - error

    def gradients(layer):
        def loss(tokens, weights, scale):
            return jnp.sum(jnp.sin(layer(tokens, ids, weights, scale)))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(tokens, weights, scale)

    got, wanted = gradients(moe), gradients(simulated)
    for what, one, other in zip(("tokens", "weights", "scale"), got, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4, err_msg=f"d {what}")
        assert np.abs(np.asarray(other)).max() > 0.1


def test_dequantize_returns_the_rows_of_a_plain_format(transport):
    case = cases.SMALL[4]
    group = group_of(case, transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.dequantize(dispatched, jnp.float32), dispatched.tokens

    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for (_, rank), (rows, tokens) in shards(group.mesh, out):
        used = len(inputs.routed.rows[rank])
        assert_same_bits(rows[:used], tokens[:used].astype(np.float32), f"rank {rank}")
        assert not rows[used:].any()
