"""An MoE layer whose shared expert and dense layer overlap with dispatch and combine.

So do their backwards with those of the calls.
Compares losses and gradients with the same layer without overlap.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
jax.config.update("jax_default_matmul_precision", "float32")
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
config = jax_ep.EPConfig(
    n_experts=16,
    top_k=4,
    hidden_size=256,
    max_tokens_per_rank=128,
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
    n_sms=16,  # multiprocessors per call; the rest of the GPU is left for the overlapping work
)
group = jax_ep.ep_init(mesh, "ep", config)


def route(tokens, router):
    return jax.lax.top_k(jax.nn.softmax(tokens @ router), config.top_k)


def experts(rows, weights):
    hidden = jax_ep.grouped_matmul(rows.tokens, weights, rows.row_offsets)
    return jax.nn.silu(hidden)


def sequential(tokens, router, shared, weights, dense):
    scales, ids = route(tokens, router)
    rows = jax_ep.dispatch(group, tokens, ids)
    shared_out = jax.nn.silu(tokens @ shared)
    out = jax_ep.combine(group, experts(rows, weights), rows, scales, residual=shared_out)
    return out + jax.nn.silu(shared_out @ dense)


def overlapped(tokens, router, shared, weights, dense):
    scales, ids = route(tokens, router)
    in_flight = jax_ep.dispatch_async(group, tokens, ids)
    shared_out = in_flight.overlap(lambda x: jax.nn.silu(x @ shared), tokens)
    rows = jax_ep.dispatch_wait(group, in_flight)
    in_flight = jax_ep.combine_async(
        group, experts(rows, weights), rows, scales, residual=shared_out
    )
    dense_out = in_flight.overlap(lambda x: jax.nn.silu(x @ dense), shared_out)
    return jax_ep.combine_wait(group, in_flight) + dense_out


def loss(layer, tokens, *weights):
    step = lambda x, _: (jnp.tanh(layer(x, *weights)), None)  # noqa: E731
    tokens, _ = jax.lax.scan(step, tokens, length=2)
    return jax.lax.pmean(jnp.mean(tokens**2), "ep")


def run(layer, *arrays):
    function = jax.value_and_grad(functools.partial(loss, layer), argnums=(0, 1, 2))
    sharded, everywhere = P("ep"), P()
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(sharded, everywhere, everywhere, sharded, everywhere),
        out_specs=(everywhere, (sharded, everywhere, everywhere)),
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


shapes = [(128 * mesh.size, 256), (256, 16), (256, 256), (16, 256, 256), (256, 256)]
keys = jax.random.split(jax.random.key(0), len(shapes))
arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
arrays = [arrays[0], *(array / 16 for array in arrays[1:])]
wanted, got = run(sequential, *arrays), run(overlapped, *arrays)
for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())
print(f"loss {got[0]:.4f}, gradients equal to those without overlap")
print(f"{mesh.size} ranks, transport {group.transport}")
