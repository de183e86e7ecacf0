"""A small group of `host`, and calls in which all ranks or all but one take part."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from harness import AXIS, make_mesh, put

R, E, K, H, T = 4, 8, 2, 64, 16


def open_group(timeout_s: float) -> jax_ep.EPGroup:
    config = jax_ep.EPConfig(
        n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T, timeout_s=timeout_s
    )
    return jax_ep.ep_init(make_mesh(R), AXIS, config, transport="host")


def round_trip(group, tokens):
    """The tokens, by way of two experts each."""
    ids = jnp.arange(T * K, dtype=jnp.int32).reshape(T, K) % E
    rows = jax_ep.dispatch(group, tokens, ids)
    return jax_ep.combine(group, rows.tokens, rows) / 2


def make_tokens() -> jax.Array:
    (tokens,) = put(make_mesh(R), np.arange(R * T * H).reshape(R, T, H).astype(jnp.bfloat16))
    return tokens


def without_rank_3(group, tokens):
    is_missing = jax.lax.axis_index(AXIS) == 3
    return jax.lax.cond(is_missing, lambda: tokens, lambda: round_trip(group, tokens))
