"""Expert, data and tensor parallelism, and sharded parameters (FSDP), on one mesh.

| axis | tokens | experts |
|---|---|---|
| "fsdp" | sharded | sharded along H, gathered for use |
| "ep" | sharded | each rank holds its own |
| "tp" | the same | each device holds a slice of every expert's F |
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
mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("fsdp", "ep", "tp"))
config = jax_ep.EPConfig(
    n_experts=8,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=32,
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
)
group = jax_ep.ep_init(mesh, "ep", config)  # one group of ranks for each index of "fsdp" and "tp"

SPECS = {
    "tokens": P(("fsdp", "ep")),
    "router": P(),
    # [E, H, 2, F], gate and up apart, so that a slice of F has both.
    "gate_up": P("ep", "fsdp", None, "tp"),
    "down": P("ep", "tp", "fsdp"),  # [E, F, H]
}


@jax.shard_map(mesh=mesh, in_specs=(SPECS,), out_specs=SPECS["tokens"])
def moe_layer(arrays):
    tokens = arrays["tokens"]
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ arrays["router"]), config.top_k)
    # The gradients of these gathers are reduce-scatters.
    gate_up = jax.lax.all_gather(arrays["gate_up"], "fsdp", axis=1, tiled=True)
    down = jax.lax.all_gather(arrays["down"], "fsdp", axis=2, tiled=True)
    gate_up = gate_up.reshape(*gate_up.shape[:2], -1)  # [L, H, 2 F / tp]

    # The gradient of a sum over "tp" goes here, to T tokens, rather than to their C rows.
    tokens, weights = jax.lax.pcast((tokens, weights), "tp", to="varying")
    rows = jax_ep.dispatch(group, tokens, ids, weights)
    partial_results = jax_ep.expert_mlp(rows, gate_up, down)
    return jax.lax.psum(jax_ep.combine(group, partial_results, rows), "tp")


def dense_layer(arrays):
    tokens, gate_up = arrays["tokens"], arrays["gate_up"]
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ arrays["router"]), config.top_k)
    gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
    return dense_experts(tokens, ids, weights, gate_up, arrays["down"])


def loss(layer, arrays):
    return jnp.mean(layer(arrays) ** 2)


shapes = [(128, 64), (64, 8), (8, 64, 2, 96), (8, 96, 64)]
arrays = dict(zip(SPECS, normal(*shapes), strict=True))
arrays["gate_up"] /= 4  # `normal` takes axis -2 for the one that is summed over
sharded = {n: jax.device_put(x, jax.NamedSharding(mesh, SPECS[n])) for n, x in arrays.items()}
step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
got = step(moe_layer, sharded)
assert_close(got, step(dense_layer, arrays))
for name, grad in got[1].items():  # as the parameters: no device holds more of a gradient
    assert grad.sharding.is_equivalent_to(sharded[name].sharding, grad.ndim), name
print(f"loss and gradients equal on {mesh.size} devices, transport {group.transport}")
