"""An MoE layer inside a function that is manual over some axes of the mesh only.

The training step is manual over "data", where it reduces gradients by itself. Over "model" it is
automatic: XLA partitions the dense layers by the shardings of their weights. `dispatch` and
`combine` need every axis to be manual, so the MoE layer makes the others manual too, by a second
`jax.shard_map` inside the first.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep
from reference import assert_close, dense_experts, normal

jax.config.update("jax_platforms", "cpu")  # leave this out where there are 8 GPUs
jax.config.update("jax_num_cpu_devices", 16)  # before jaxlib 0.12, XLA needs two threads per device
jax.config.update("jax_default_matmul_precision", "float32")
mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
config = jax_ep.EPConfig(
    n_experts=16,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=32,
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
)
group = jax_ep.ep_init(mesh, "model", config)  # experts are spread over "model"


def experts_on_each_rank(tokens, topk_ids, topk_weights, gate_up, down):
    rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
    return jax_ep.combine(group, jax_ep.expert_mlp(rows, gate_up, down), rows)


def expert_parallel(*arrays):
    """The experts, where "data" is manual already and "model" is not."""
    return jax.shard_map(
        experts_on_each_rank,  # the mesh is that of the function around it
        axis_names={"model"},
        in_specs=P("model"),
        out_specs=P("model"),
        check_vma=False,
    )(*arrays)


def model(run_experts, params, tokens):
    """Two dense layers with the experts between them."""
    hidden = jnp.tanh(tokens @ params["before"])
    weights, ids = jax.lax.top_k(jax.nn.softmax(hidden @ params["router"]), config.top_k)
    hidden += run_experts(hidden, ids, weights, params["gate_up"], params["down"])
    return jnp.tanh(hidden @ params["after"])


def loss(run_experts, params, tokens):
    return jnp.mean(model(run_experts, params, tokens) ** 2)


def gradient_of_shard(params, tokens):
    grads = jax.grad(loss, argnums=1)(expert_parallel, params, tokens)
    return jax.lax.pmean(grads, "data")  # in place of this, a reduction of your own


gradient = jax.jit(
    jax.shard_map(
        gradient_of_shard,
        mesh=mesh,
        axis_names={"data"},
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,  # with it, JAX cannot lower gradients of nested shard_maps
    )
)


shapes = {
    "before": (64, 64),
    "router": (64, 16),
    "gate_up": (16, 64, 2 * 48),
    "down": (16, 48, 64),
    "after": (64, 64),
}
specs = {
    "before": P(None, "model"),
    "router": P(),
    "gate_up": P("model"),
    "down": P("model"),
    "after": P("model"),
}
*arrays, tokens = normal(*shapes.values(), (256, 64))
params = dict(zip(shapes, arrays, strict=True))
shardings = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
got = gradient(jax.device_put(params, shardings), tokens)
assert_close(
    got, jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(dense_experts, params, tokens)
)
print(f"gradients equal on {mesh.size} devices, transport {group.transport}")
