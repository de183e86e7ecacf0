"""Shared by the triggers: a small group and calls of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep

R, E, K, H, T = 4, 8, 2, 16, 4


def make_mesh(devices=None, shape=(R,), names=("ep",)) -> jax.sharding.Mesh:
    devices = jax.devices()[:R] if devices is None else devices
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


def config(**changes: Any) -> jax_ep.EPConfig:
    values = dict(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T)
    return jax_ep.EPConfig(**(values | changes))


def init(mesh=None, transport="host", **changes: Any) -> jax_ep.EPGroup:
    mesh = make_mesh() if mesh is None else mesh
    return jax_ep.ep_init(mesh, "ep", config(**changes), transport)


def run(body: Callable[..., Any], mesh=None, **options: Any) -> Any:
    """Runs a per-rank function on a scalar per rank, and waits for its result."""
    mesh = make_mesh() if mesh is None else mesh
    spec = jax.P("ep")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    ranks = jnp.arange(mesh.shape["ep"])
    return jax.block_until_ready(jax.jit(mapped)(ranks))


def operands(shape=(T, K)) -> tuple[jax.Array, jax.Array]:
    return jnp.ones((T, H), jnp.bfloat16), jnp.zeros(shape, jnp.int32)


def round_trip(group, change=lambda d: d, dtype=jnp.bfloat16, **options: Any) -> Any:
    """Runs a dispatch, changes its result, and combines it with `options`."""

    def body(rank: jax.Array) -> jax.Array:
        weights = jnp.ones((T, K)) if options.pop("at_dispatch", False) else None
        dispatched = change(jax_ep.dispatch(group, *operands(), weights))
        rows = jnp.zeros((group.max_recv_tokens, H), dtype)
        return jax_ep.combine(group, rows, dispatched, **options)

    return run(body)


def closed_group() -> jax_ep.EPGroup:
    group = init(timeout_s=40)
    group.close()
    return group
