"""Errors in place of drops: `EPConfig(on_drop="raise")`, and such options of layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.geometry import Geometry
from jax_ep.operands.checks import vary_alike

_MAX_RANKS = 8  # that a message lists


def raise_on_drops(
    geometry: Geometry, n_dropped: jax.Array, describe: Callable[[str, int], str]
) -> jax.Array:
    """`int32[]`, zero; if any device of the mesh drops something, all fail where it is used.

    A device that went on would wait for the others in the next collective. So add the result to
    what the rest of the program is computed from.

    Args:
        geometry: of the group.
        n_dropped: `int32[]`, of this device.
        describe: the message, from the text that says how many each rank dropped, and the most.
    """
    names = geometry.mesh.axis_names
    check = functools.partial(_check, geometry, describe)

    def call(counts: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        zero = jax.pure_callback(check, shape, counts, vmap_method="sequential")
        return vary_alike(names, zero)[0]

    n_dropped = lax.stop_gradient(n_dropped)
    counts = lax.all_gather(vary_alike(names, n_dropped)[0], names)
    zero = lax.cond((counts > 0).any(), call, lambda counts: counts[0], counts)
    # Where devices do the same work, their results have to remain the same by type.
    same = jax.typeof(zero).mat.varying - jax.typeof(n_dropped).mat.varying
    return lax.pmax(zero, tuple(sorted(same))) if same else zero


def _check(geometry: Geometry, describe: Callable[[str, int], str], counts: Any) -> np.ndarray:
    """Runs on the host, for each device."""
    found = np.asarray(counts).reshape(-1)
    if not found.any():
        return np.zeros((), np.int32)
    raise RuntimeError(describe(_by_rank(geometry, found.tolist()), int(found.max())))


def _by_rank(geometry: Geometry, counts: Sequence[int]) -> str:
    """Such as `37 were dropped, 30 on rank 2, 7 on rank 3`."""
    where = [(n, each) for n, each in zip(counts, geometry.coordinates, strict=True) if n]
    where.sort(key=lambda pair: (pair[1].replica, pair[1].rank))
    n_replicas = len({each.replica for each in geometry.coordinates})
    named = [
        f"{n} on rank {each.rank}{f' of replica {each.replica}' if n_replicas > 1 else ''}"
        for n, each in where[:_MAX_RANKS]
    ]
    if len(where) > _MAX_RANKS:
        named.append(f"others on {len(where) - _MAX_RANKS} more ranks")
    return f"{sum(counts)} were dropped, {', '.join(named)}"
