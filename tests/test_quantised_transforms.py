"""Quantised calls under JAX's transformations, compared with plain ones in bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import cases
import jax_ep
from harness import on_mesh, on_mesh_eager, shards
from test_transforms import assert_all_same, make_group, n_calls, operands_of

N_LAYERS = 2
# One with padding and float scales, one packed with atoms and an input scale.
NAMES = ("blockwise_fp8", "nvfp4")


def moe(group, tokens, topk_ids, topk_weights):
    dispatched = jax_ep.dispatch(group, tokens, topk_ids)
    rows = jax_ep.dequantize(dispatched) * jnp.bfloat16(2)
    return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)


@pytest.fixture(params=NAMES)
def layer(request, transport):
    """Gives a group, its layer and the operands."""
    case = cases.QUANTISED_SMALL[request.param]
    group = make_group(transport, case)
    return group, functools.partial(moe, group), operands_of(group.mesh, case)


def gradient(step):
    """Gives d tokens of the sum of some layers."""

    def loss(tokens, topk_ids, topk_weights):
        for _ in range(N_LAYERS):
            tokens = step(tokens, topk_ids, topk_weights) * jnp.bfloat16(0.25)
        return jnp.sum(tokens.astype(jnp.float32))

    return jax.grad(loss)


def test_checkpointed_layers_have_the_same_gradients(layer, transport):
    group, step, operands = layer
    keep = jax.checkpoint_policies.save_only_these_names(jax_ep.DISPATCH_NAME)
    programs = [
        on_mesh(group.mesh, gradient(each)).lower(*operands).compile()
        for each in (step, jax.checkpoint(step), jax.checkpoint(step, policy=keep))
    ]
    wanted, again, kept = (program(*operands) for program in programs)
    assert_all_same(group.mesh, again, wanted, "again")
    assert_all_same(group.mesh, kept, wanted, "kept")
    if transport != "xla":  # XLA may merge a collective that is made again
        assert n_calls(programs[2]) <= n_calls(programs[1])
        assert n_calls(programs[2]) == n_calls(programs[0])


def test_scan_of_layers_has_the_unrolled_gradients(layer):
    group, step, operands = layer

    def scanned(tokens, topk_ids, topk_weights):
        @jax.checkpoint
        def body(tokens, _):
            tokens = step(tokens, topk_ids, topk_weights)
            return tokens * jnp.bfloat16(0.25), None

        tokens, _ = jax.lax.scan(body, tokens, None, length=N_LAYERS)
        return jnp.sum(tokens.astype(jnp.float32))

    got = on_mesh(group.mesh, jax.grad(scanned))(*operands)
    wanted = on_mesh(group.mesh, gradient(step))(*operands)
    assert_all_same(group.mesh, got, wanted, "scan")


def test_vmap_gives_the_bits_of_a_loop(layer):
    group, step, operands = layer

    def mapped(tokens, topk_ids, topk_weights):
        both = jnp.stack([tokens, -tokens])
        return jax.vmap(step, in_axes=(0, None, None))(both, topk_ids, topk_weights)

    def looped(tokens, topk_ids, topk_weights):
        return jnp.stack([step(x, topk_ids, topk_weights) for x in (tokens, -tokens)])

    got, wanted = (on_mesh(group.mesh, body)(*operands) for body in (mapped, looped))
    assert_all_same(group.mesh, got, wanted, "vmap")


def test_a_result_crosses_the_border_of_a_jitted_function(layer):
    group, step, operands = layer

    def send(tokens, topk_ids, topk_weights):
        return jax_ep.dispatch(group, tokens, topk_ids), tokens, topk_weights

    def bring_back(dispatched, tokens, topk_weights):
        rows = jax_ep.dequantize(dispatched) * jnp.bfloat16(2)
        return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)

    got = on_mesh(group.mesh, bring_back)(*on_mesh(group.mesh, send)(*operands))
    wanted = on_mesh(group.mesh, step)(*operands)
    assert_all_same(group.mesh, got, wanted, "two programs")


def test_unjitted_calls_give_the_same_bits(layer):
    group, step, operands = layer
    got = on_mesh_eager(group.mesh, step)(*operands)
    wanted = on_mesh(group.mesh, step)(*operands)
    assert_all_same(group.mesh, got, wanted, "unjitted")


def test_an_input_scale_may_be_computed(transport):
    """Traced, of shape [1], and without a gradient."""
    group = make_group(transport, cases.QUANTISED_SMALL["nvfp4"])
    tokens, topk_ids, _ = operands_of(group.mesh, cases.QUANTISED_SMALL["nvfp4"])

    def rows(tokens, topk_ids, scale):
        scale = jnp.max(jnp.abs(tokens.astype(jnp.float32))) * 0 + scale
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, input_scale=scale[None])
        return jnp.sum(jax_ep.dequantize(dispatched, jnp.float32))

    def both(tokens, topk_ids):
        scale = jnp.float32(0.3)
        grads = jax.grad(rows, argnums=(0, 2))(tokens, topk_ids, scale)
        fixed = jax_ep.dispatch(group, tokens, topk_ids, input_scale=scale)
        total = jnp.sum(jax_ep.dequantize(fixed, jnp.float32))
        return grads, rows(tokens, topk_ids, scale) - total

    results = on_mesh(group.mesh, both)(tokens, topk_ids)
    for _, ((d_tokens, d_scale), difference) in shards(group.mesh, results):
        assert d_tokens.any()
        assert not d_scale.any()
        assert not difference.any()
