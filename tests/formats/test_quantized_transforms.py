"""Calls with quantized formats under JAX's transformations, compared bitwise with plain calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
from harness import assert_trees_equal, group_of, on_mesh, on_mesh_eager, shards
from transformed_calls import (
    CHECKPOINTED,
    both_signs_looped,
    both_signs_mapped,
    n_calls,
    operands_of,
)

N_LAYERS = 2
# One format with padding and float scales, one packed with atoms and an input scale.
NAMES = ("blockwise_fp8", "nvfp4")


def moe(group, tokens, topk_ids, topk_weights):
    dispatched = jax_ep.dispatch(group, tokens, topk_ids)
    rows = jax_ep.dequantize(dispatched) * jnp.bfloat16(2)
    return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)


@pytest.fixture(params=NAMES)
def case(request):
    return cases.QUANTIZED_SMALL[request.param]


@pytest.fixture
def layer(case, transport):
    """A group, its layer and the operands."""
    group = group_of(case, transport)
    return group, functools.partial(moe, group), operands_of(group.mesh, case)


def gradient(step):
    """The gradient in the tokens of a sum of layers."""

    def loss(tokens, topk_ids, topk_weights):
        for _ in range(N_LAYERS):
            tokens = step(tokens, topk_ids, topk_weights) * jnp.bfloat16(0.25)
        return jnp.sum(tokens.astype(jnp.float32))

    return jax.grad(loss)


@pytest.mark.thorough
def test_checkpointed_layers_have_the_same_gradients(layer, transport):
    group, step, operands = layer
    names = ("plain", "nothing saved", "dispatch saved")
    programs = [
        on_mesh(group.mesh, gradient(CHECKPOINTED[name](step))).compile(*operands) for name in names
    ]
    wanted, *others = (program(*operands) for program in programs)
    for name, got in zip(names[1:], others, strict=True):
        assert_trees_equal(group.mesh, got, wanted, name)
    if transport != "xla":  # XLA may merge a collective that is repeated
        plain, nothing_saved, dispatch_saved = map(n_calls, programs)
        assert dispatch_saved <= nothing_saved
        assert dispatch_saved == plain


@pytest.mark.thorough
@pytest.mark.parametrize("case", cases.QUANTIZED_SMALL.values(), ids=cases.QUANTIZED_SMALL)
def test_saved_codes_and_scales_keep_their_values(case, transport):
    """Also from 256 on, in e4m3; the backward pass needs them."""
    group = group_of(case, transport)
    is_scaled = group.config.token_format.takes_input_scale
    scale = jnp.float32(448 * 6 / 4) if is_scaled else None

    def step(tokens, topk_ids, topk_weights):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids, input_scale=scale)
        rows = jnp.sin(jax_ep.dequantize(dispatched)).astype(group.config.combine_dtype)
        return jax_ep.combine(group, rows, dispatched, topk_weights)

    operands = operands_of(group.mesh, case)
    wanted, got = (
        on_mesh(group.mesh, gradient(CHECKPOINTED[name](step)))(*operands)
        for name in ("plain", "dispatch saved")
    )
    for shard in wanted.addressable_shards:
        assert np.isfinite(np.asarray(shard.data, np.float32)).all()
    assert_trees_equal(group.mesh, got, wanted, case.token_format)


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
    assert_trees_equal(group.mesh, got, wanted, "scan")


@pytest.mark.thorough
def test_vmap_gives_the_bits_of_a_loop(layer):
    group, step, operands = layer
    got, wanted = (
        on_mesh(group.mesh, functools.partial(body, step))(*operands)
        for body in (both_signs_mapped, both_signs_looped)
    )
    assert_trees_equal(group.mesh, got, wanted, "vmap")


@pytest.mark.thorough
def test_a_dispatched_result_may_leave_a_jitted_function(layer):
    group, step, operands = layer

    def send(tokens, topk_ids, topk_weights):
        return jax_ep.dispatch(group, tokens, topk_ids), tokens, topk_weights

    def bring_back(dispatched, tokens, topk_weights):
        rows = jax_ep.dequantize(dispatched) * jnp.bfloat16(2)
        return jax_ep.combine(group, rows, dispatched, topk_weights, residual=tokens)

    got = on_mesh(group.mesh, bring_back)(*on_mesh(group.mesh, send)(*operands))
    wanted = on_mesh(group.mesh, step)(*operands)
    assert_trees_equal(group.mesh, got, wanted, "two programs")


@pytest.mark.thorough
@pytest.mark.usefixtures("program_cache")
def test_calls_without_jit_give_the_same_bits(layer):
    group, step, operands = layer
    got = on_mesh_eager(group.mesh, step)(*operands)
    wanted = on_mesh(group.mesh, step)(*operands)
    assert_trees_equal(group.mesh, got, wanted, "without jit")


def test_an_input_scale_may_be_computed(transport):
    """Traced, of shape [1], and without a gradient."""
    case = cases.QUANTIZED_SMALL["nvfp4"]
    group = group_of(case, transport)
    tokens, topk_ids, _ = operands_of(group.mesh, case)

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
