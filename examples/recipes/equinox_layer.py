"""An MoE layer as an Equinox module, with plain `jax.shard_map`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep
from jax_ep.router import RouterConfig, balance_loss, route
from reference import assert_close, dense_experts, normal

jax.config.update("jax_platforms", "cpu")  # leave this out where there are 8 GPUs
jax.config.update("jax_num_cpu_devices", 16)  # before jaxlib 0.12, XLA needs two threads per device
jax.config.update("jax_default_matmul_precision", "float32")
ROUTER = RouterConfig(scores="sigmoid", scaling=2.5)
TOKENS = P(("dp", "ep"))


class MoE(eqx.Module):
    router: jax.Array  # [H, E]
    gate_up: jax.Array  # [E, H, 2 F]
    down: jax.Array  # [E, F, H]
    config: jax_ep.EPConfig = eqx.field(static=True)
    group: jax_ep.EPGroup | None = eqx.field(static=True)  # None: dense, on one device

    def __init__(self, config, group, width, key):
        n_experts, size = config.n_experts, config.hidden_size
        shapes = (size, n_experts), (n_experts, size, 2 * width), (n_experts, width, size)
        self.router, self.gate_up, self.down = normal(*shapes, key=key)
        self.config, self.group = config, group

    def specs(self):
        """The module, with a PartitionSpec in place of each array."""
        experts = jax.tree.map(lambda _: P("ep"), self)
        return eqx.tree_at(lambda moe: moe.router, experts, P())

    def __call__(self, tokens):  # [B, S, H]
        if self.group is None:
            return self.forward(tokens, dense_experts)
        layer = jax.shard_map(
            lambda moe, tokens: moe.forward(tokens, moe.experts_on_each_rank, TOKENS[0]),
            mesh=self.group.mesh,
            in_specs=(self.specs(), TOKENS),
            out_specs=(TOKENS, P()),
        )
        return layer(self, tokens)

    def forward(self, tokens, run_experts, axis_name=()):
        routes = route(ROUTER, tokens @ self.router, self.config.top_k)
        loss = balance_loss(routes.scores, routes.topk_ids, axis_name=axis_name)
        weights = routes.topk_weights
        return run_experts(tokens, routes.topk_ids, weights, self.gate_up, self.down), loss

    def experts_on_each_rank(self, tokens, topk_ids, topk_weights, gate_up, down):
        rows = jax_ep.dispatch(self.group, tokens, topk_ids, topk_weights)
        return jax_ep.combine(self.group, jax_ep.expert_mlp(rows, gate_up, down), rows)


@eqx.filter_jit
@eqx.filter_value_and_grad
def step(moe, tokens):
    output, balance = moe(tokens)
    return jnp.mean(output**2) + 0.01 * balance


mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "ep"))
config = jax_ep.EPConfig(
    n_experts=16,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=32,
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
)
group = jax_ep.ep_init(mesh, "ep", config)


@eqx.filter_jit
def create(group):  # in jit, every device creates the shards that it holds
    moe = MoE(config, group, width=96, key=jax.random.key(1))
    if group is None:
        return moe
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(group.mesh, spec), moe.specs())
    return eqx.filter_shard(moe, shardings)


(tokens,) = normal((16, 16, 64))
loss, grads = step(create(group), jax.device_put(tokens, jax.NamedSharding(mesh, TOKENS)))
dense_loss, dense_grads = step(create(None), tokens)
got, wanted = (loss, jax.tree.leaves(grads)), (dense_loss, jax.tree.leaves(dense_grads))
assert_close(got, wanted)
print(f"loss and gradients equal on {mesh.size} devices, transport {group.transport}")
