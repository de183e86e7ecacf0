"""A Mixture-of-Experts layer with its experts spread over all devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep

jax.config.update("jax_num_cpu_devices", 8)  # if JAX finds no GPU
jax.config.update("jax_default_matmul_precision", "float32")
mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
config = jax_ep.EPConfig(
    n_experts=16,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=32,
    token_format=jax_ep.Plain(jnp.float32),  # bfloat16 by default
    combine_dtype=jnp.float32,  # bfloat16 by default
)
group = jax_ep.ep_init(mesh, "ep", config)


@jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P("ep"), P("ep")), out_specs=P("ep"))
def moe_layer(tokens, router, up, down):  # one rank: its tokens, its experts
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ router), config.top_k)
    rows = jax_ep.dispatch(group, tokens, ids)  # tokens travel to their experts
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows.tokens, up, rows.group_sizes))
    results = jax.lax.ragged_dot(hidden, down, rows.group_sizes)
    return jax_ep.combine(group, results, rows, weights)  # and back, summed with weights


def dense_layer(tokens, router, up, down):  # the reference: every expert, every token
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ router), config.top_k)
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, config.n_experts))
    hidden = jax.nn.silu(jnp.einsum("th,ehf->tef", tokens, up))
    return jnp.einsum("te,tef,efh->th", gates, hidden, down)


def loss(layer, *arrays):
    return jnp.sum(layer(*arrays) ** 2)


shapes = [(32 * mesh.size, 64), (64, 16), (16, 64, 128), (16, 128, 64)]
keys = jax.random.split(jax.random.key(0), len(shapes))
arrays = [jax.random.normal(*pair) / 4 for pair in zip(keys, shapes, strict=True)]
step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)
sparse, dense = step(moe_layer, *arrays), step(dense_layer, *arrays)
for name, (value, grads) in {"moe_layer": sparse, "dense_layer": dense}.items():
    norms = ", ".join(f"{jnp.linalg.norm(grad):.1f}" for grad in grads)
    print(f"{name:12} loss {value:.1f}, gradient norms {norms}")
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), sparse, dense)
print(f"equal on {group.n_ranks} ranks, transport {group.transport}")
