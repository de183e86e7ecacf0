"""The overhead of a jitted call: a dispatch of minimal size on one CPU device.

It covers Python, JAX, XLA and the handler. For comparison: a jitted function that only returns as
many arrays of the same shapes.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

import implementations
import programs
import timing
from case import Case

_BATCH = 50


def measure(repeats: timing.Repeats) -> Iterator[dict[str, Any]]:
    """Measures the wall time per call, each waited for; batches of calls interleave."""

    def batch(function, args):
        for _ in range(_BATCH):
            jax.block_until_ready(function(*args))

    batches = {name: (batch, call) for name, call in _make_calls().items()}
    for name, seconds in timing.wall(batches, repeats).items():
        figures = timing.summary([t / _BATCH for t in seconds])
        where = {"operation": "dispatch of minimal size", "clock": "wall"}
        yield {"times": {**where, "implementation": name, **figures}}


def _make_calls() -> dict[str, timing.Call]:
    mesh = Mesh(jax.devices("cpu")[:1], (implementations.AXIS,), axis_types=(AxisType.Auto,))
    case = Case(n_tokens=1, hidden_size=16, n_experts=1, top_k=1, n_ranks=1)
    ids, weights = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.float32)
    operands = jnp.ones((1, 16), jnp.bfloat16), ids, weights
    bodies = {
        name: programs.dispatch(implementations.make(implementations.AT_COMBINE, mesh, case, name))
        for name in ("host", "xla")
    }
    shapes = jax.tree.leaves(jax.eval_shape(programs.on_mesh(mesh, bodies["host"]), *operands))

    def as_many(_, ids, __):
        one = ids[0, 0] + 1
        return [jnp.full(x.shape, one.astype(x.dtype)) for x in shapes]

    bodies["as many results"] = as_many
    return {name: (programs.on_mesh(mesh, body), operands) for name, body in bodies.items()}
