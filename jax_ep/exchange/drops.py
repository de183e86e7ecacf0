"""Errors in place of drops: `EPConfig(on_drop="raise")`, and such options of layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.exchange.checks import vary_alike
from jax_ep.geometry import Geometry

_MAX_RANKS = 8  # that a message lists


def raise_on_drops(
    geometry: Geometry,
    n_dropped: jax.Array,
    describe: Callable[[str, int], str],
    all_gather: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`int32[]`, zero; if any device of the mesh drops something, all fail where it is used.

    A device that went on would wait for the others in the next collective. So add the result to
    what the rest of the program is computed from.

    Args:
        geometry: of the group.
        n_dropped: `int32[]`, of this device.
        describe: the message, from the text that says how many each rank dropped, and the most.
        all_gather: over the ranks of the group; replicas are asked by XLA's.
    """
    names = geometry.mesh.axis_names
    check = functools.partial(_check, describe)

    def call(counts: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        zero = jax.pure_callback(check, shape, counts, vmap_method="sequential")
        return vary_alike(names, zero)[0]

    n_dropped = lax.stop_gradient(n_dropped)
    counts = all_gather(vary_alike(names, n_dropped)[0])
    others = tuple(name for name in names if name not in geometry.axis_names)
    counts = lax.all_gather(counts, others) if others else counts[None]  # [replicas, R]
    zero = lax.cond((counts > 0).any(), call, lambda counts: counts[0, 0], counts)
    # Where devices do the same work, their results have to remain the same by type.
    same = jax.typeof(zero).mat.varying - jax.typeof(n_dropped).mat.varying
    return lax.pmax(zero, tuple(sorted(same))) if same else zero


def _check(describe: Callable[[str, int], str], counts: Any) -> np.ndarray:
    """Runs on the host, for each device."""
    found = np.asarray(counts)
    if not found.any():
        return np.zeros((), np.int32)
    raise RuntimeError(describe(_by_rank(found), int(found.max())))


def _by_rank(counts: np.ndarray) -> str:
    """Such as `37 were dropped, 30 on rank 2, 7 on rank 3`, of `[replicas, R]`."""
    where = np.argwhere(counts).tolist()
    named = [
        f"{counts[replica, rank]} on rank {rank}"
        + (f" of replica {replica}" if len(counts) > 1 else "")
        for replica, rank in where[:_MAX_RANKS]
    ]
    if len(where) > _MAX_RANKS:
        named.append(f"others on {len(where) - _MAX_RANKS} more ranks")
    return f"{counts.sum()} were dropped, {', '.join(named)}"
