"""An MoE layer after tensor-parallel attention, where all ranks hold the same tokens.

dispatch and combine send nothing. Each rank computes the contribution of its own experts, and of
its share of the shared expert's tokens; one psum over the ranks completes the layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
jax.config.update("jax_default_matmul_precision", "float32")
mesh = jax.sharding.Mesh(jax.devices()[:8], ("tp",))
config = jax_ep.EPConfig(
    n_experts=16,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=32,
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
    fused_shared_expert=True,
    skip_a2a=True,
)
group = jax_ep.ep_init(mesh, "tp", config)


def route(tokens, router):
    return jax.lax.top_k(jax.nn.softmax(tokens @ router), config.top_k)


@jax.shard_map(mesh=mesh, in_specs=(P(), P(), P(), P("tp")), out_specs=P())
def moe_layer(tokens, router, shared, experts):
    weights, ids = route(tokens, router)
    rows = jax_ep.dispatch(group, tokens, ids)  # the shared expert's rows come first
    matrices = jnp.concatenate([shared[None], experts])
    results = jax.nn.silu(jax_ep.grouped_matmul(rows.tokens, matrices, rows.row_offsets))
    return jax.lax.psum(jax_ep.combine(group, results, rows, weights), "tp")


def dense_layer(tokens, router, shared, experts):
    weights, ids = route(tokens, router)
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, config.n_experts))
    results = jax.nn.silu(jnp.einsum("th,ehf->tef", tokens, experts))
    return jnp.einsum("te,tef->tf", gates, results) + jax.nn.silu(tokens @ shared)


def loss(layer, *arrays):
    return jnp.sum(layer(*arrays) ** 2)


shapes = [(32, 64), (64, 16), (64, 64), (16, 64, 64)]
keys = jax.random.split(jax.random.key(0), len(shapes))
arrays = [jax.random.normal(*pair) / 4 for pair in zip(keys, shapes, strict=True)]
step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)
sparse, dense = step(moe_layer, *arrays), step(dense_layer, *arrays)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), sparse, dense)
n_rows = group.max_recv_tokens
print(f"equal on {group.n_ranks} ranks of {n_rows} rows, transport {group.transport}")
