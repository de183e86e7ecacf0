"""A backend for Levanter's grug MoE: functions of arrays on a mesh with explicit axes.

`moe_mlp_ep_local` takes what grug's own expert-parallel backends take on each shard, and returns
what they return: the output, and how many choices were dropped. `moe_mlp` and `CapacityDrops` stand
for grug's own of these names.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import AxisType, reshard

import jax_ep
from reference import assert_close, dense_experts, normal

jax.config.update("jax_platforms", "cpu")  # leave this out where there are 8 GPUs
jax.config.update("jax_num_cpu_devices", 16)  # before jaxlib 0.12, XLA needs two threads per device
jax.config.update("jax_default_matmul_precision", "float32")
BATCH = ("data", "expert")  # mesh axes that grug shards tokens over


class CapacityDrops(NamedTuple):
    sender_dropped: jax.Array
    receiver_dropped: jax.Array


def make_group(mesh, n_experts, top_k, hidden_dim, tokens_per_shard, capacity_factor):
    """The group, made where the mesh is: outside of `jit`, which knows no devices."""
    config = jax_ep.EPConfig(
        n_experts=n_experts,
        top_k=top_k,
        hidden_size=hidden_dim,
        max_tokens_per_rank=tokens_per_shard,
        recv_capacity=math.ceil(capacity_factor * tokens_per_shard * top_k),
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
    )
    return jax_ep.ep_init(mesh, "expert", config)


def moe_mlp_ep_local(
    x_local,  # [T, H]
    selected_experts_local,  # [T, K]
    combine_weights_local,  # [T, K]
    token_valid_local,  # bool[T]
    moe_w13_local,  # [L, H, 2 I]
    moe_w2_local,  # [L, I, H]
    *,
    activation_fn,
    num_experts,
    capacity_factor,
    token_sharding_axes,
    group,
):
    del num_experts, capacity_factor  # the group has them
    ids = jnp.where(token_valid_local[:, None], selected_experts_local, -1)
    rows = jax_ep.dispatch(group, x_local, ids, combine_weights_local)
    w13_out = jax_ep.grouped_matmul(rows.tokens, moe_w13_local, rows.row_offsets)
    gate, up = jnp.split(w13_out, 2, axis=-1)
    results = jax_ep.grouped_matmul(activation_fn(gate) * up, moe_w2_local, rows.row_offsets)
    dropped = jax.lax.psum(rows.n_dropped, token_sharding_axes)
    drops = CapacityDrops(sender_dropped=jnp.zeros_like(dropped), receiver_dropped=dropped)
    return jax_ep.combine(group, results, rows), drops


def moe_mlp(x, selected_experts, combine_weights, token_valid, w13, w2, *, activation_fn, group):
    """The layer for arrays of the whole mesh."""
    local = functools.partial(
        moe_mlp_ep_local,
        activation_fn=activation_fn,
        num_experts=len(w13),
        capacity_factor=None,
        token_sharding_axes=BATCH,
        group=group,
    )
    experts = P("expert", None, None)
    mapped = jax.shard_map(
        local,
        in_specs=(P(BATCH), P(BATCH), P(BATCH), P(BATCH), experts, experts),
        out_specs=(P(BATCH), P()),
    )
    w13, w2 = reshard(w13, experts), reshard(w2, experts)  # gathers over "data"
    return mapped(x, selected_experts, combine_weights, token_valid, w13, w2)


def layer(run, params, x, is_token):
    """Router and experts: top-k of the logits, then a softmax over the chosen ones."""
    chosen, ids = jax.lax.top_k(x @ params["router"], 2)
    output, drops = run(x, ids, jax.nn.softmax(chosen), is_token, params["w13"], params["w2"])
    return jnp.mean(output**2), (output, drops)


def dense_mlp(x, selected_experts, combine_weights, token_valid, w13, w2):
    weights = jnp.where(token_valid[:, None], combine_weights, 0)
    return dense_experts(x, selected_experts, weights, w13, w2), None


mesh = jax.make_mesh((2, 4), BATCH, (AxisType.Explicit,) * 2, devices=jax.devices()[:8])
group = make_group(mesh, 16, 2, 64, tokens_per_shard=32, capacity_factor=2.0)
*arrays, x = normal((64, 16), (16, 64, 2 * 96), (16, 96, 64), (256, 64))
names = "router", "w13", "w2"
params, is_token = dict(zip(names, arrays, strict=True)), jnp.arange(256) % 8 < 7
run = functools.partial(moe_mlp, activation_fn=jax.nn.silu, group=group)
step = jax.jit(jax.grad(layer, argnums=(1, 2), has_aux=True), static_argnums=0)
with jax.set_mesh(mesh):
    specs = {"router": P(), "w13": P("expert", "data"), "w2": P("expert", None, "data")}
    sharded = {name: reshard(each, specs[name]) for name, each in params.items()}
    grads, (output, drops) = step(run, sharded, reshard(x, P(BATCH)), reshard(is_token, P(BATCH)))
wanted, (dense_output, _) = step(dense_mlp, params, x, is_token)
assert_close((grads, output), (wanted, dense_output))
assert drops == (0, 0)
print(f"output and gradients equal on {mesh.size} devices, transport {group.transport}")
