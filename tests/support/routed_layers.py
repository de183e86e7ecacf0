"""Small layers of jax_ep.nnx.MoE for tests of routers; and dense ones, for given routes."""

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ep.nnx import MoE
from nnx_layers import open_group

E, K, H, F, B, LENGTH = 8, 2, 32, 16, 8, 4
SIZES = {"n_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": B * LENGTH}


def make(config=None, axes=None, **options):
    group = open_group("auto", axes or {"ep": 4}, **SIZES | (config or {}))
    return MoE(group, F, rngs=nnx.Rngs(0), **options)


def make_tokens():
    return jax.random.normal(jax.random.key(1), (B, LENGTH, H))


call = nnx.jit(lambda layer, *args, **router_args: layer(*args, **router_args))


def mlp(tokens, gate_up, down):
    """`[..., E, H]`: the results of all experts."""
    gate, up = jnp.split(jnp.einsum("...h,ehf->...ef", tokens, gate_up), 2, axis=-1)
    return jnp.einsum("...ef,efh->...eh", jax.nn.silu(gate) * up, down)


def dense(weights, tokens, routes):
    """The layer's output for these routes."""
    results = mlp(tokens, weights["gate_up"], weights["down"])
    ids, gates = routes.topk_ids, routes.topk_weights
    chosen = jax.nn.one_hot(ids, E)  # -1: none
    gates = jnp.ones(ids.shape) if gates is None else gates
    return jnp.einsum("...k,...ke,...eh->...h", gates, chosen, results)
