"""Trains an MoE layer that spreads copies of its popular experts over the ranks every 20 steps.

Topics of the data are popular by Zipf's law, and so are experts. The step is compiled once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import P

import jax_ep
import jax_ep.nnx

N_EXPERTS, N_TOKENS, H = 64, 128, 64  # N_TOKENS: per rank and step

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
n_redundant = 16 if mesh.size > 1 else 0  # a rank holds an expert at most once
config = jax_ep.EPConfig(
    n_experts=N_EXPERTS + n_redundant, top_k=2, hidden_size=H, max_tokens_per_rank=N_TOKENS
)
group = jax_ep.ep_init(mesh, "ep", config)
n_traces = 0


def place(load):
    """The placement for a load of the logical experts."""
    return jax_ep.ExpertPlacement(jax_ep.rebalance(load, group.n_ranks, n_redundant), group.n_ranks)


@nnx.jit
def create():
    layer = jax_ep.nnx.MoE(group, 64, placement=place(np.ones(N_EXPERTS)), rngs=nnx.Rngs(0))
    return layer, nnx.Optimizer(layer, optax.adam(3e-3), wrt=nnx.Param)


@nnx.jit
def train_step(layer, optimizer, x, wanted):
    global n_traces
    n_traces += 1

    def loss(layer):
        output, report = layer(x)
        return jnp.mean((output - wanted) ** 2), report.expert_load

    (error, load), grads = nnx.value_and_grad(loss, has_aux=True)(layer)
    optimizer.update(layer, grads)
    return error, load


def batch(step):
    """Tokens of random topics, and their targets."""
    rng = np.random.default_rng(0)
    centers, targets = rng.standard_normal((2, 200, H))
    popularity = np.arange(1, 201) ** -1.1
    rng = np.random.default_rng([1, step])
    topics = rng.choice(200, mesh.size * N_TOKENS, p=popularity / popularity.sum())
    x = centers[topics] + 0.3 * rng.standard_normal((len(topics), H))
    return jax.device_put((np.float32(x), np.float32(targets[topics])), by_rank)


def rows_of_ranks(load, placement):
    """The mean rows of each rank: copies share the load of their expert."""
    logical = np.asarray(placement.physical_to_logical)
    return (load / np.bincount(logical))[logical].reshape(group.n_ranks, -1).sum(axis=1)


by_rank = jax.NamedSharding(mesh, P("ep"))
layer, optimizer = create()
for begin in range(0, 80, 20):
    load = np.zeros(N_EXPERTS, np.int64)
    for step in range(begin, begin + 20):
        error, step_load = train_step(layer, optimizer, *batch(step))
        load += np.asarray(step_load)  # waits
    rows = rows_of_ranks(load, layer.placement.get())
    print(f"steps {begin:2} to {step}: error {error:.2f},", end=" ")
    print(f"the busiest rank had {rows.max() / rows.mean():.2f} times the mean")
    layer.placement.set(place(load))
print(f"{n_traces} compilation, {group.n_ranks} ranks, transport {group.transport}")
