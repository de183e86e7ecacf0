"""A Flax NNX model with an MoE layer, trained for a few steps with both ways of balancing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import P

import jax_ep
import jax_ep.nnx
from jax_ep.router import RouterConfig

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
config = jax_ep.EPConfig(n_experts=32, top_k=4, hidden_size=64, max_tokens_per_rank=64)
group = jax_ep.ep_init(mesh, "ep", config)  # one group serves all layers
router = RouterConfig(scores="sigmoid", scaling=2.5)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.moe = jax_ep.nnx.MoE(
            group, 64, router=router, router_bias=True, shared_size=64, rngs=rngs
        )

    def __call__(self, x):  # [B, S, H], sharded over the mesh along B
        output, report = self.moe(self.norm(x))
        return x + output, report


@nnx.jit
def create():  # in jit, every device creates the shards that it holds
    model = Block(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, wanted):
    def loss(model):
        output, report = model(x)
        error = jnp.mean((output - wanted) ** 2)
        return error + 1e-4 * report.balance_loss, (error, report)

    grads, (error, report) = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    model.moe.update_bias(report.expert_load, rate=1e-2)
    return error, report.expert_load, report.n_dropped


model, optimizer = create()
x = jax.random.normal(jax.random.key(1), (8 * mesh.size, 8, 64)) + 0.5  # all alike: a skewed load
batch = jax.device_put((x, jnp.roll(jnp.sin(2 * x), 1, axis=-1)), jax.NamedSharding(mesh, P("ep")))
for step in range(41):
    error, load, n_dropped = train_step(model, optimizer, *batch)
    if step % 20 == 0:  # waits
        busiest = np.max(load) / np.mean(load)
        print(f"step {step:2}: error {error:.2f}, {n_dropped} rows dropped,", end=" ")
        print(f"the busiest expert has {busiest:.1f} times the mean")
print(f"{group.n_ranks} ranks, transport {group.transport}")
