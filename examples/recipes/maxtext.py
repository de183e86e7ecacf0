"""MaxText's `sparse_matmul` with `dispatch` and `combine` inside.

`RoutedMoE` has the shape of MaxText's class of that name: the same method, arguments, kernels and
mesh axes, with what the recipe does not concern left out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep
from jax_ep.router import balance_loss
from reference import assert_close, dense_experts, normal

jax.config.update("jax_platforms", "cpu")  # leave this out where there are 8 GPUs
jax.config.update("jax_num_cpu_devices", 16)  # before jaxlib 0.12, XLA needs two threads per device
jax.config.update("jax_default_matmul_precision", "float32")
BATCH = ("data", "fsdp", "expert")  # of the axes of "activation_batch", those that devices are on


class RoutedMoE:
    def __init__(self, mesh, config):
        self.mesh, self.top_k = mesh, config.top_k
        self.group = jax_ep.ep_init(mesh, "expert", config)  # equal ones share their buffers

    def get_topk(self, gate_logits):
        weights, ids = jax.lax.top_k(gate_logits, self.top_k)
        return jax.nn.softmax(weights.astype(jnp.float32)), ids

    def sparse_matmul(self, inputs, gate_logits, w0_kernel, w1_kernel, wo_kernel):
        @functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(P(BATCH), P(BATCH), P("expert"), P("expert"), P("expert")),
            out_specs=(P(BATCH), P()),
        )
        def sparse_matmul_route_and_compute(x, logits, w0, w1, wo):
            weights, selected_experts = self.get_topk(logits)
            scores = jax.nn.softmax(logits.astype(jnp.float32))
            lb_loss = balance_loss(scores, selected_experts, axis_name=BATCH)

            rows = jax_ep.dispatch(self.group, x, selected_experts, weights)
            gmm = functools.partial(jax_ep.grouped_matmul, row_offsets=rows.row_offsets)
            intermediate = jax.nn.silu(gmm(rows.tokens, w0)) * gmm(rows.tokens, w1)
            output = jax_ep.combine(self.group, gmm(intermediate, wo), rows)
            return output, lb_loss

        return sparse_matmul_route_and_compute(inputs, gate_logits, w0_kernel, w1_kernel, wo_kernel)


def loss(sparse_matmul, inputs, gate, *kernels):
    output, lb_loss = sparse_matmul(inputs, inputs @ gate, *kernels)
    return jnp.mean(output**2) + 0.01 * lb_loss


def dense_matmul(inputs, gate_logits, w0, w1, wo):
    weights, ids = jax.lax.top_k(gate_logits, moe.top_k)
    gate_up = jnp.concatenate([w0, w1], axis=-1)
    output = dense_experts(inputs, ids, jax.nn.softmax(weights), gate_up, wo)
    return output, balance_loss(jax.nn.softmax(gate_logits), ids)


mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), BATCH)
config = jax_ep.EPConfig(
    n_experts=8,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=2 * 16,  # per-device batch size times sequence length
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
)
moe = RoutedMoE(mesh, config)
arrays = normal((16, 16, 64), (64, 8), (8, 64, 96), (8, 64, 96), (8, 96, 64))
up, down = P("expert", "fsdp"), P("expert", None, "fsdp")  # gathered over "fsdp" by XLA
sharded = [
    jax.device_put(array, jax.NamedSharding(mesh, spec))
    for array, spec in zip(arrays, (P(BATCH), P(), up, up, down), strict=True)
]
step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4, 5)), static_argnums=0)
assert_close(step(moe.sparse_matmul, *sharded), step(dense_matmul, *arrays))
print(f"loss and gradients equal on {mesh.size} devices, transport {moe.group.transport}")
