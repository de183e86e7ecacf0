"""A Mixture-of-Experts layer with its experts spread over all devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
config = jax_ep.EPConfig(n_experts=16, top_k=2, hidden_size=64, max_tokens_per_rank=32)
group = jax_ep.ep_init(mesh, "ep", config)


@jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P("ep"), P("ep")), out_specs=P("ep"))
def moe_layer(tokens, router, gate_up, down):  # one rank: its tokens, its experts
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ router), config.top_k)
    rows = jax_ep.dispatch(group, tokens, ids, weights.astype(jnp.float32))  # to their experts
    results = jax_ep.expert_mlp(rows, gate_up, down)
    return jax_ep.combine(group, results, rows)  # and back, summed with weights


def dense_layer(tokens, router, gate_up, down):  # the reference: every expert, every token
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ router), config.top_k)
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, config.n_experts))
    gate, up = jnp.split(jnp.einsum("th,ehf->tef", tokens, gate_up), 2, axis=-1)
    return jnp.einsum("te,tef,efh->th", gates, jax.nn.silu(gate) * up, down)


def loss(layer, *arrays):
    return jnp.sum(layer(*arrays).astype(jnp.float32) ** 2)


shapes = [(32 * mesh.size, 64), (64, 16), (16, 64, 2 * 128), (16, 128, 64)]
keys = jax.random.split(jax.random.key(0), len(shapes))
arrays = [jax.random.normal(*pair, jnp.bfloat16) / 4 for pair in zip(keys, shapes, strict=True)]
step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)
sparse, dense = step(moe_layer, *arrays), step(dense_layer, *arrays)
for name, (value, grads) in {"moe_layer": sparse, "dense_layer": dense}.items():
    norms = ", ".join(f"{np.linalg.norm(np.float32(grad)):.0f}" for grad in grads)
    print(f"{name:12} loss {value:.0f}, gradient norms {norms}")
for got, wanted in zip(jax.tree.leaves(sparse), jax.tree.leaves(dense), strict=True):
    got, wanted = np.float32(got), np.float32(wanted)
    assert np.linalg.norm(got - wanted) < 0.01 * np.linalg.norm(wanted)
print(f"equal on {group.n_ranks} ranks, transport {group.transport}")
