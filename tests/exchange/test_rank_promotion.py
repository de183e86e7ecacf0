"""Users who let JAX refuse operands of different ranks (`jax_numpy_rank_promotion`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
from harness import AXIS, make_mesh
from jax_ep.nnx import MoE
from jax_ep.router import RouterConfig

R, E, P, K, H, T = 4, 8, 12, 2, 64, 8
LAYERS = {
    "shared expert and biases": {"group": {"fused_shared_expert": True}, "expert_bias": True},
    "codes and copies": {
        "group": {"token_format": jax_ep.NVFP4(), "n_experts": P},
        "placement": [0, 2, 5, 1, 3, 0, 4, 7, 6, 6, 7, 0],
    },
    "limits": {"group": {"zero_unused_rows": True}, "capacity_factor": 1.0, "capacity_axis": AXIS},
}


@nnx.jit
def step(layer, tokens):
    def loss(layer, tokens):
        output, report = layer(tokens)
        return jnp.sum(output.astype(jnp.float32)), report.expert_load

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_layers_promote_no_ranks(name, transport):
    options = dict(LAYERS[name])
    sizes = {"n_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": T}
    config = jax_ep.EPConfig(**(sizes | options.pop("group")))
    group = jax_ep.ep_init(make_mesh(R), AXIS, config, transport)
    router = RouterConfig(scores="sigmoid", n_expert_groups=4, topk_expert_groups=2)
    with jax.numpy_rank_promotion("raise"):
        if "placement" in options:
            options["placement"] = jax_ep.ExpertPlacement(options["placement"], R)
        options |= {"router": router, "router_bias": True, "logit_bias": True}
        layer = MoE(group, H, rngs=nnx.Rngs(0), **options)
        _, load = step(layer, jnp.ones((R * T, H), jnp.bfloat16))
    assert np.sum(load) == R * T * K
