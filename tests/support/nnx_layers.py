"""Layers of jax_ep.nnx.MoE for tests, and the same in plain JAX, where every expert processes every
token.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from harness import float32_group
from jax_ep.nnx import MoE
from jax_ep.nnx.token_axes import axes_of, axes_of_dimension
from jax_ep.router import RouterConfig, balance_loss, expert_load, route

E, K, H, F, S = 16, 3, 128, 128, 64
B, LENGTH = 8, 6
V3 = RouterConfig(
    scores="sigmoid", scaling=2.5, n_expert_groups=4, topk_expert_groups=2, group_scores="top2"
)


def make_mesh(axes):
    sizes = tuple(axes.values())
    n_devices = int(np.prod(sizes))
    if len(jax.devices()) < n_devices:
        pytest.skip(f"needs {n_devices} devices, found {len(jax.devices())}")
    return Mesh(np.array(jax.devices()[:n_devices]).reshape(sizes), tuple(axes))


def open_group(transport, axes, group_axes="ep", mesh=None, **options):
    sizes = dict(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=B * LENGTH)
    return float32_group(mesh or make_mesh(axes), transport, group_axes, **sizes | options)


def make_layer(transport, *, axes=None, group_axes="ep", config=None, **options):
    group = open_group(transport, axes or {"ep": 4}, group_axes, **config or {})
    layer = MoE(group, F, rngs=nnx.Rngs(0), **options)
    if layer.router_bias is not None:
        layer.router_bias[...] = 0.3 * jax.random.normal(jax.random.key(5), (E,))
    for i, name in enumerate(("logit_bias", "gate_up_bias", "down_bias")):
        bias = getattr(layer, name)
        if bias is not None:
            assert not bias[...].any()
            bias[...] = 0.3 * jax.random.normal(jax.random.key(i), bias.shape, bias.dtype)
    return layer


def make_tokens(shape=(B, LENGTH, H), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), shape, dtype)


def masked_step(mask):
    """A jitted function of a layer and tokens: gradients in both, output and report."""

    @nnx.jit
    def step(layer, tokens):
        def loss(layer, tokens):
            output, report = layer(tokens, mask)
            losses = report.balance_loss + report.z_loss
            return jnp.sum(jnp.sin(output)) + losses, (output, report)

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, tokens)

    return step


def host_program(layer, tokens):
    """What XLA makes of a call of a layer on all axes; skips the test on other transports."""
    if layer.group.transport != "host":
        pytest.skip(f"looks at programs of transport host, not {layer.group.transport}")
    mesh = layer.group.mesh
    tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P(mesh.axis_names)))
    graph, state = nnx.split(layer)
    compiled = jax.jit(lambda *args: nnx.merge(graph, args[0])(args[1])).lower(state, tokens)
    return compiled.compile().as_text()


def by_shard(x, layer):
    """`[n_shards, ...]`: the part of `[B, LENGTH, ...]` that each shard of the tokens has."""
    sizes = [axes_of_dimension(layer.token_axes, i) for i in range(2)]
    n, m = (int(np.prod([layer.group.mesh.shape[name] for name in axes])) for axes in sizes)
    x = x.reshape(n, B // n, m, LENGTH // m, *x.shape[2:])
    return x.swapaxes(1, 2).reshape(n * m, B // n, LENGTH // m, *x.shape[4:])


def from_shards(x, layer):
    """The inverse of `by_shard`."""
    sizes = x.shape[1:3]
    x = x.reshape(B // sizes[0], LENGTH // sizes[1], *x.shape[1:])
    return x.swapaxes(1, 2).reshape(B, LENGTH, *x.shape[4:])


def is_kept(topk_ids, layer):
    """`bool[..., K]`: choices within the capacity of their expert, which counts rank by rank.

    Or over the ranks along `capacity_axes`, which are all that tokens are sharded over, in order.
    """
    shards = by_shard(topk_ids, layer)
    assert layer.capacity_axes in ((), axes_of(layer.token_axes))
    choices = jax.nn.one_hot(shards.reshape(1 if layer.capacity_axes else len(shards), -1), E)
    capacity = math.ceil(Fraction(str(layer.capacity_factor)) * choices.shape[1] / E)
    earlier = jnp.cumsum(choices, axis=1) - choices  # choices of the same expert
    kept = (earlier * choices).sum(axis=-1) < capacity
    return from_shards(kept.reshape(shards.shape), layer)


def activate(hidden, layer):
    gate, up = jnp.split(hidden, 2, axis=-1)
    if layer.interleaved:
        gate, up = hidden[..., ::2], hidden[..., 1::2]
    if layer.clamp is None:
        return jax.nn.silu(gate) * up
    alpha, limit = layer.clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def dense(weights, tokens, layer):
    """Output, losses and load, on one device."""
    if layer.transposed:
        matrices = ("gate_up", "down", "shared_gate_up", "shared_down")
        weights = {k: x.swapaxes(-1, -2) if k in matrices else x for k, x in weights.items()}
    config, bias = layer.router_config, weights.get("router_bias")
    logits = tokens @ weights["router"] + weights.get("logit_bias", 0)
    routes = route(config, logits, K, bias)
    choices = jax.nn.one_hot(routes.topk_ids, E)
    if layer.capacity_factor is not None:
        choices = jnp.where(is_kept(routes.topk_ids, layer)[..., None], choices, 0)
    gates = jnp.einsum("...k,...ke->...e", routes.topk_weights, choices)
    hidden = jnp.einsum("...h,ehf->...ef", tokens, weights["gate_up"])
    values = activate(hidden + weights.get("gate_up_bias", 0), layer)
    results = jnp.einsum("...ef,efh->...eh", values, weights["down"])
    output = jnp.einsum("...e,...eh->...h", gates, results + weights.get("down_bias", 0))
    if "shared_down" in weights:
        output += activate(tokens @ weights["shared_gate_up"], layer) @ weights["shared_down"]
    loss = balance_loss(routes.scores, routes.topk_ids, per_sequence=layer.balance_per_sequence)
    z_loss = jnp.mean(jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2)
    return output, (loss, z_loss), expert_load(routes.topk_ids, E)


def weights_of(layer):
    """The layer's variables on one device, by name."""
    state = nnx.to_pure_dict(nnx.state(layer))
    return jax.device_put(jax.tree.map(np.asarray, state), jax.devices()[0])


def assert_close(got, wanted, error=1e-4):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.linalg.norm(got - wanted) <= error * np.linalg.norm(wanted)


def objective(output, losses):
    balance, z_loss = losses
    return jnp.sum(jnp.sin(output.astype(jnp.float32))) + 3 * balance + 0.5 * z_loss


def losses_of(report):
    return report.balance_loss, report.z_loss


def dense_gradients(layer, tokens):
    """Gradients of the weights, then output, losses, load and the gradient of the tokens."""

    @jax.jit
    def gradients(weights, tokens):
        def loss(weights, tokens):
            output, losses, load = dense(weights, tokens, layer)
            return objective(output, losses), (output, losses, load)

        grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, tokens)
        return grads[0], (*results, grads[1])

    return gradients(weights_of(layer), jax.device_put(tokens, jax.devices()[0]))
