"""Gradients through formats that quantise: straight through, to the last bit."""

from __future__ import annotations

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
from harness import AXIS, assert_same_bits, config_of, make_mesh, on_mesh, place, shards
from test_grad import assert_gradient, dense_layer

NAMES = list(cases.QUANTISED_SMALL)


def small(name: str, **changes):
    return cases.QUANTISED_SMALL[name].but(**changes)


@pytest.mark.parametrize("weights", ["none", "row"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_gradient_reaches_its_token(name, weights, transport):
    """NaN as the cotangent of rows that are not in use, and of padding rows."""
    case = small(name, weights=weights, routing="with_minus_one")
    inputs = suite.make_inputs(case)
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case), transport)
    at_row = weights == "row"

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        def rows(tokens, topk_weights):
            sent = (topk_weights,) if at_row else ()
            dispatched = jax_ep.dispatch(group, tokens, topk_ids, *sent)
            return jax_ep.dequantize(dispatched)

        values, pull = jax.vjp(rows, tokens, topk_weights)
        d_tokens, d_weights = pull(expert_out)
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        _, pull = jax.vjp(
            lambda rows: jax_ep.combine(group, rows, dispatched), expert_out
        )
        return values, d_tokens, d_weights, pull(residual)[0]

    operands = (place(group.mesh, [x]) for x in inputs.arrays())
    out = on_mesh(group.mesh, body)(*operands)
    d_tokens, _ = oracle.dispatch_grad(inputs.routed, inputs.expert_out)
    d_expert_out, _ = oracle.combine_grad(
        inputs.routed, inputs.expert_out, inputs.residual
    )
    values = expected_values(case, inputs)
    for (_, rank), (rows, got_tokens, got_weights, got_rows) in shards(group.mesh, out):
        what = f"{case.name} on {transport}, rank {rank}"
        assert_same_bits(rows, values[rank], what)
        assert_gradient(transport, got_tokens, d_tokens[rank], what)
        assert not got_weights.any(), what
        assert_same_bits(got_rows, d_expert_out[rank], what)


def test_an_activation_without_a_gradient_stands_in_a_layer_with_one(transport):
    """That of the weights, and of the tokens past it: `x` alone is kept from it."""
    case = small("mxfp8", weights="none")
    inputs = suite.make_inputs(case)
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case), transport)

    def loss(stop, tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        x = jax_ep.dequantize(rows)
        acts = jax_ep.fused_silu(stop(x), rows.row_offsets, jax_ep.MXFP8())
        numbers = jax_ep.MXFP8().dequantize_rows(
            acts.tokens, acts.scales, rows.row_offsets
        )
        out = x + jnp.tile(numbers, 2).astype(x.dtype)
        out = jax_ep.combine(group, out, rows, topk_weights)
        return jnp.sum(out.astype(jnp.float32))

    def gradients(stop, *operands):
        grad = jax.grad(functools.partial(loss, stop), argnums=(0, 2))
        return on_mesh(group.mesh, grad)(*operands)

    weights = [np.nan_to_num(each) for each in inputs.topk_weights]
    arrays = inputs.tokens, inputs.topk_ids, weights
    operands = [place(group.mesh, [x]) for x in arrays]
    for _, grads in shards(group.mesh, gradients(jax.lax.stop_gradient, *operands)):
        assert all(np.abs(each.astype(np.float32)).max() > 0.1 for each in grads)
    with pytest.raises(NotImplementedError, match="mxfp8 quantises"):
        gradients(lambda x: x, *operands)


@pytest.mark.usefixtures("one_process")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="patches transport host")
def test_cotangents_in_pieces_give_the_same_bits(monkeypatch):
    """What `p2p` does with float32 tokens where experts give bfloat16."""
    case = small("mxfp8", token_dtype="float32")
    inputs = suite.make_inputs(case)
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case), "host")

    def body(tokens, topk_ids, cotangent):
        def rows(tokens):
            return jax_ep.dequantize(jax_ep.dispatch(group, tokens, topk_ids))

        return jax.vjp(rows, tokens)[1](cotangent)[0]

    cotangents = [np.nan_to_num(x).astype(np.float32) for x in inputs.expert_out]
    arrays = inputs.tokens, inputs.topk_ids, cotangents
    operands = [place(group.mesh, [x]) for x in arrays]
    whole = on_mesh(group.mesh, body)(*operands)
    shapes = []

    def n_pieces(self, group, rows):
        shapes.append(rows.shape)
        return 2

    monkeypatch.setattr(type(group._transport), "n_pieces", n_pieces)
    in_pieces = on_mesh(group.mesh, lambda *args: body(*args))(*operands)
    assert shapes
    assert np.asarray(whole).any()
    assert_same_bits(np.asarray(in_pieces), np.asarray(whole), "two pieces")


def expected_values(case, inputs) -> list[np.ndarray]:
    """What `dequantize` gives: bfloat16[C, H], zero in rows of no token."""
    quantised = [formats.quantize(case.token_format, x) for x in inputs.tokens]
    values = [formats.dequantize(case.token_format, each) for each in quantised]
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


def moe_layer(group):
    def body(tokens, topk_ids, topk_weights, scale):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        rows = jax_ep.dequantize(dispatched)
        rank = jax.lax.axis_index(group.axis_name)
        row = jnp.arange(rows.shape[0], dtype=jnp.uint32)
        which = jnp.searchsorted(dispatched.row_offsets[1:], row, side="right")
        expert = jnp.minimum(which, group.n_local_experts - 1)
        used = scale[rank * group.n_local_experts + expert]
        rows = jnp.tanh(rows * used[:, None])
        return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)

    return body


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_layers_gradients_are_those_of_simulated_quantisation(
    name, check_vma, transport
):
    case = small(
        name,
        token_dtype="float32",
        combine_dtype="float32",
        hidden_size=128,
        max_tokens=6,
        routing="with_minus_one",
    )
    mesh = make_mesh(4)
    group = jax_ep.ep_init(mesh, AXIS, config_of(case), transport)
    inputs = suite.make_inputs(case)
    tokens, ids = np.stack(inputs.tokens), np.stack(inputs.topk_ids)
    weights = np.nan_to_num(np.stack(inputs.topk_weights))
    scale = np.linspace(0.5, 1.5, case.n_experts, dtype=np.float32)
    shard = jax.P(mesh.axis_names)
    moe = jax.shard_map(
        lambda *xs: moe_layer(group)(*(x[0] for x in xs[:3]), xs[3])[None],
        mesh=mesh,
        in_specs=(shard, shard, shard, jax.P()),
        out_specs=shard,
        check_vma=check_vma,
    )

    def loss(layer, tokens, weights, scale):
        return jnp.sum(jnp.sin(layer(tokens, ids, weights, scale)))

    # Straight through: the rounding error is a constant. The residual has none.
    error = rounding_error(name, tokens)

    def simulated(tokens, ids, weights, scale):
        return dense_layer(tokens + error, ids, weights, scale, "source") - error

    operands = (jnp.asarray(tokens), jnp.asarray(weights), jnp.asarray(scale))
    grads = functools.partial(jax.grad, argnums=(0, 1, 2))
    got = jax.jit(grads(functools.partial(loss, moe)))(*operands)
    wanted = grads(functools.partial(loss, simulated))(*operands)
    for what, one, other in zip(
        ("tokens", "weights", "scale"), got, wanted, strict=True
    ):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4, err_msg=f"d {what}")
        assert np.abs(np.asarray(other)).max() > 0.1


def test_dequantize_of_a_plain_format_gives_the_rows(transport):
    case = cases.SMALL[4]
    group = jax_ep.ep_init(make_mesh(4), AXIS, config_of(case), transport)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        rows = jax_ep.dequantize(dispatched, jnp.float32)
        return rows, dispatched.tokens

    operands = (place(group.mesh, [x]) for x in (inputs.tokens, inputs.topk_ids))
    out = on_mesh(group.mesh, body)(*operands)
    for (_, rank), (rows, tokens) in shards(group.mesh, out):
        used = len(inputs.routed.rows[rank])
        assert_same_bits(rows[:used], tokens[:used].astype(np.float32), f"rank {rank}")
        assert not rows[used:].any()
