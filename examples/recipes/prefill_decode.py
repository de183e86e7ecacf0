"""Inference with a group for prefill and another for decoding, on devices of their own or not.

The two phases differ in tokens per call by orders of magnitude, and so in the buffers that they
need. The model mixes the positions of a sequence by their running mean, in place of attention; the
mean's sum and length stand for the cache that moves from one phase to the other.
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
TOP_K, SIZE, PROMPT, N_SLOTS, N_STEPS = 2, 64, 32, 16, 6
BY_RANK = P("ep")
SPECS = {"mix": P(), "router": P(), "gate_up": BY_RANK, "down": BY_RANK}


def make_group(devices, max_tokens_per_rank, memory_of=None, **options):
    config = jax_ep.EPConfig(
        n_experts=16,
        top_k=TOP_K,
        hidden_size=SIZE,
        max_tokens_per_rank=max_tokens_per_rank,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
        **options,
    )
    mesh = jax.sharding.Mesh(devices, ("ep",))
    return jax_ep.ep_init(mesh, "ep", config, memory_of=memory_of)


def experts_of(group):
    """The experts on a group's devices, as a function of arrays of its whole mesh."""

    @jax.shard_map(mesh=group.mesh, in_specs=BY_RANK, out_specs=BY_RANK)
    def experts(tokens, topk_ids, topk_weights, gate_up, down):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        return jax_ep.combine(group, jax_ep.expert_mlp(rows, gate_up, down), rows)

    return experts


def model(experts, params, x, cache, is_active):
    """`[B, S, H]`, which follow what `cache` has of each sequence, to `[B, S, H]` and a cache."""
    total, length = cache  # [B, H], [B]
    totals = total[:, None] + jnp.cumsum(x, axis=1)
    lengths = length[:, None] + jnp.arange(1, x.shape[1] + 1)
    x += jnp.tanh(totals / lengths[..., None] @ params["mix"])
    weights, ids = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), TOP_K)
    ids = jnp.where(is_active[:, None, None], ids, -1)  # free slots send nothing
    x += experts(x, ids, weights, params["gate_up"], params["down"])
    return x, (totals[:, -1], lengths[:, -1])


def generate(prompt_experts, step_experts, shard_prompt, shard_step, params, prompts):
    """Outputs of `N_STEPS` steps after the prompts; slot i is free from step i on."""
    run = jax.jit(model, static_argnums=0)
    cache = jnp.zeros((N_SLOTS, SIZE)), jnp.zeros(N_SLOTS, jnp.int32)
    args = shard_prompt((prompts, cache, jnp.ones(N_SLOTS, bool)))
    x, cache = run(prompt_experts, shard_prompt(params, SPECS), *args)

    params, (x, cache) = shard_step(params, SPECS), shard_step((x[:, -1:], cache))
    outputs = []
    for step in range(N_STEPS):
        is_active = jnp.arange(N_SLOTS) > step
        x, cache = run(step_experts, params, x, cache, shard_step(is_active))
        outputs.append(np.asarray(x))  # waits
    return np.stack(outputs)


def sharder(group):
    """A function that puts a tree on a group's mesh, sharded over ranks unless `specs` say else."""

    def shard(tree, specs=BY_RANK):
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(group.mesh, spec), specs)
        return jax.device_put(tree, shardings)

    return shard


# A decode group has few tokens, and room for the worst case. In prefill, the worst case is large
# and far from what happens, so the group has twice the mean.
prefill = make_group(jax.devices()[:4], 4 * PROMPT, recv_capacity=2 * 4 * PROMPT * TOP_K)
decode = make_group(jax.devices()[4:8], 4)
shapes = [(SIZE, SIZE), (SIZE, 16), (16, SIZE, 2 * 48), (16, 48, SIZE)]
*arrays, prompts = normal(*shapes, (N_SLOTS, PROMPT, SIZE))
params = dict(zip(SPECS, arrays, strict=True))
groups = experts_of(prefill), experts_of(decode), sharder(prefill), sharder(decode)
one_device = (dense_experts, dense_experts, *[lambda tree, specs=None: tree] * 2)
outputs = generate(*groups, params, prompts)
assert_close(outputs, generate(*one_device, params, prompts))

# On the devices of prefill, a decode group needs no memory of its own: calls take turns.
decode_here = make_group(jax.devices()[:4], 4, memory_of=prefill)
groups = experts_of(prefill), experts_of(decode_here), sharder(prefill), sharder(decode_here)
np.testing.assert_array_equal(generate(*groups, params, prompts), outputs)
assert decode_here.memory == prefill.memory
print(f"{N_STEPS} steps equal: prefill into {prefill.max_recv_tokens} rows,", end=" ")
print(f"decode into {decode.max_recv_tokens}, transport {decode.transport}")
