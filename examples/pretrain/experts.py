"""Which MoE layer a model has: jax_ep's, or one without expert parallelism to compare it with."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import jax_ep
import jax_ep.nnx
from layout import DATA, EXPERT
from ragged import RaggedMoE, ragged_dot_of
from sizes import Sizes

KINDS = "jax_ep", "lax", "tokamax"

CreateMoE = Callable[[nnx.Rngs], nnx.Module]  # modules: [B, S, H] -> ([B, S, H], MoEReport)
INIT = nnx.initializers.normal(0.02)


def make_group(
    mesh: Mesh,
    sizes: Sizes,
    n_tokens: int,
    dtype: Any,
    capacity: float | None,
    expert_copies: int,
    transport: str,
) -> jax_ep.EPGroup:
    """Returns the group of the expert axis, which serves all layers.

    Args:
        mesh: of the model.
        sizes: of the model.
        n_tokens: of each device.
        dtype: of tokens and matmuls.
        capacity: rows of a device, in terms of their mean; None has room for any routing.
        expert_copies: that a device may take to balance each step; 0 for no balance.
        transport: of `jax_ep.ep_init`.
    """
    rows = None if capacity is None else math.ceil(Fraction(str(capacity)) * n_tokens * sizes.top_k)
    config = jax_ep.EPConfig(
        n_experts=sizes.n_experts,
        top_k=sizes.top_k,
        hidden_size=sizes.hidden_size,
        max_tokens_per_rank=n_tokens,
        token_format=jax_ep.Plain(dtype),
        combine_dtype=dtype,
        recv_capacity=rows,
        expert_copies=expert_copies,
    )
    return jax_ep.ep_init(mesh, EXPERT, config, transport)


def moe_of(kind: str, mesh: Mesh, sizes: Sizes, dtype: Any, group: Any) -> CreateMoE:
    """Returns a function that creates the MoE layer of one block; `group` is for jax_ep's alone.

    Raises:
        ValueError: `kind` needs a library that is not installed.
    """
    if kind == "jax_ep":
        return lambda rngs: jax_ep.nnx.MoE(
            group,
            sizes.expert_size,
            fsdp_axis=DATA,
            kernel_init=INIT,
            param_dtype=jnp.float32,
            rngs=rngs,
        )
    ragged_dot = ragged_dot_of(kind)
    return lambda rngs: RaggedMoE(sizes, mesh, dtype, ragged_dot, INIT, rngs)
