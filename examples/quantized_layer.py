"""An MoE layer in every token format, compared with the same layer in bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import jax_ep

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
jax.config.update("jax_default_matmul_precision", "float32")
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
FORMATS = [jax_ep.BF16(), jax_ep.BlockwiseFP8(), jax_ep.MXFP8(), jax_ep.NVFP4(), jax_ep.MXFP4()]


def activate(token_format, hidden, row_offsets):
    """Returns silu(gate) * up in float32 for the next matmul, rounded to the token format."""
    result = jax_ep.fused_silu(hidden, row_offsets, token_format)
    if isinstance(token_format, jax_ep.QuantizedFormat):
        return token_format.dequantize_rows(result.tokens, result.scales, row_offsets)
    return result.astype(jnp.float32)


def moe_layer(group, tokens, router, gate_up, down):
    weights, ids = jax.lax.top_k(jax.nn.softmax(tokens @ router), group.config.top_k)
    rows = jax_ep.dispatch(group, tokens.astype(jnp.bfloat16), ids)
    numbers = jax_ep.dequantize(rows, jnp.float32)
    hidden = jax_ep.grouped_matmul(numbers, gate_up, rows.row_offsets)
    hidden = activate(group.config.token_format, hidden, rows.row_offsets)
    results = jax_ep.grouped_matmul(hidden, down, rows.row_offsets)
    return jax_ep.combine(group, results, rows, weights)


def run(token_format, *arrays):
    config = jax_ep.EPConfig(
        n_experts=16,
        top_k=4,
        hidden_size=256,
        max_tokens_per_rank=32,
        token_format=token_format,
        combine_dtype=jnp.float32,
    )
    with jax_ep.ep_init(mesh, "ep", config) as group:
        layer = jax.shard_map(
            functools.partial(moe_layer, group),
            mesh=mesh,
            in_specs=(P("ep"), P(), P("ep"), P("ep")),
            out_specs=P("ep"),
        )
        return np.asarray(jax.jit(layer)(*arrays))


shapes = [(32 * mesh.size, 256), (256, 16), (16, 256, 256), (16, 128, 256)]
keys = jax.random.split(jax.random.key(0), len(shapes))
arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
arrays[1:] = [array / 16 for array in arrays[1:]]
wanted = run(FORMATS[0], *arrays)
for token_format in FORMATS:
    got = run(token_format, *arrays)
    cosine = np.sum(got * wanted) / np.linalg.norm(got) / np.linalg.norm(wanted)
    n_bytes = token_format.token_bytes(256)
    print(f"{token_format.name:14} {n_bytes} bytes per token, cosine {cosine:.3f}")
