"""Uses of jax_ep.nnx.MoE that docs/features.md names: pipelines, Linen, experts of many sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.nnx import MoE
from jax_ep.router import RouterConfig, route
from nnx_layers import assert_close, open_group, weights_of
from routed_layers import SIZES, E, F, K, call, dense, make, make_tokens

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")


def dense_layer(weights, tokens):
    """The default router, then all experts."""
    return dense(weights, tokens, route(RouterConfig(), tokens @ weights["router"], K))


@pytest.mark.thorough
def test_stages_of_a_pipeline_have_groups_of_their_own():
    """Each on its own devices; activations and their gradients travel by `jax.device_put`."""
    if len(jax.devices()) < 4:
        pytest.skip(f"needs 4 devices, found {len(jax.devices())}")
    meshes = [Mesh(jax.devices()[i : i + 2], ("ep",)) for i in (0, 2)]
    groups = [open_group("auto", {}, mesh=mesh, **SIZES) for mesh in meshes]
    assert groups[0].key != groups[1].key
    layers = [MoE(group, F, rngs=nnx.Rngs(i)) for i, group in enumerate(groups)]
    parts = [nnx.split(layer) for layer in layers]
    states = [state for _, state in parts]
    stages = [
        jax.jit(lambda state, x, graph=graph: x + nnx.merge(graph, state)(x)[0])
        for graph, _ in parts
    ]

    def loss(states, x):
        for mesh, stage, state in zip(meshes, stages, states, strict=True):
            x = stage(state, jax.device_put(x, NamedSharding(mesh, PartitionSpec("ep"))))
        return jnp.mean(jnp.sin(x))

    def dense_loss(weights, x):
        for each in weights:
            x = x + dense_layer(each, x)
        return jnp.mean(jnp.sin(x))

    value, grads = jax.value_and_grad(loss)(states, make_tokens())
    weights = [weights_of(layer) for layer in layers]
    wanted, wanted_grads = jax.jit(jax.value_and_grad(dense_loss))(weights, make_tokens())
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    for grad, wanted in zip(grads, wanted_grads, strict=True):
        for name in ("router", "gate_up", "down"):
            assert_close(grad[name].get_value(), wanted[name])


@pytest.mark.thorough
def test_a_layer_of_linen_wraps_the_layer():
    group, tokens = make().group, make_tokens()

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            output, report = nnx.bridge.ToLinen(MoE, args=(group, F), name="moe")(x)
            return x + output, report.balance_loss

    block = Block()
    variables = jax.jit(block.init)(jax.random.key(0), tokens)

    def loss(weights):
        return jnp.mean(jnp.sin(block.apply({"params": {"moe": weights}}, tokens)[0]))

    weights = linen.meta.unbox(variables)["params"]["moe"]
    grads = jax.jit(jax.grad(loss))(variables["params"]["moe"])
    whole = jax.device_put(jax.tree.map(np.asarray, weights), jax.devices()[0])
    wanted = jax.jit(jax.grad(lambda w: jnp.mean(jnp.sin(tokens + dense_layer(w, tokens)))))(whole)
    for name, grad in linen.meta.unbox(grads).items():
        assert_close(grad, wanted[name])


@pytest.mark.thorough
def test_experts_of_several_sizes_are_padded_with_zeros():
    """Zeros add nothing, and get no gradient: an optimizer leaves them."""
    layer, tokens = make(), make_tokens()
    sizes = np.linspace(F // 4, F, E, dtype=int)
    is_used = np.arange(F) < sizes[:, None]  # [E, F]
    masks = {"gate_up": np.concatenate([is_used, is_used], 1)[:, None], "down": is_used[..., None]}
    whole = weights_of(layer)
    for name, mask in masks.items():
        getattr(layer, name)[...] *= mask.astype(np.float32)
    padded = weights_of(layer)
    assert_close(call(layer, tokens)[0], jax.jit(dense_layer)(padded, tokens))
    assert np.abs(np.asarray(whole["down"]) - np.asarray(padded["down"])).max() > 0.1
    grads = nnx.jit(nnx.grad(lambda layer: jnp.mean(jnp.sin(layer(tokens)[0]))))(layer)
    for name, mask in masks.items():
        grad = np.asarray(grads[name].get_value())
        assert (grad[~np.broadcast_to(mask, grad.shape)] == 0).all() and grad.any()
