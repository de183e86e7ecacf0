"""Microseconds per jitted call on one device: `python call_overhead.py JSON OUT`.

At minimal size: what a call costs apart from its data, in Python, in JAX's dispatch, in
XLA and in the handler. Beside it a jitted function that adds 1, and one in a
`shard_map` that returns as many arrays of the same shapes as dispatch does.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import jax_ep
from contestants import AXIS


def make_calls() -> dict[str, tuple[Callable, tuple]]:
    """Jitted functions and their arguments, by name."""
    devices = np.array(jax.devices("cpu")[:1])
    mesh = jax.sharding.Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    config = jax_ep.EPConfig(
        n_experts=1, top_k=1, hidden_size=16, max_tokens_per_rank=1
    )
    tokens = jnp.ones((1, 16), jnp.bfloat16)
    ids, weights = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.float32)

    def on_mesh(function: Callable) -> Any:
        spec = PartitionSpec()
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )

    calls = {"x + 1": (jax.jit(lambda x: x + 1), (tokens,))}
    for name in ("host", "xla"):
        group = jax_ep.ep_init(mesh, AXIS, config, transport=name)

        def dispatch(tokens: jax.Array, ids: jax.Array, group: Any = group) -> Any:
            return jax_ep.dispatch(group, tokens, ids)

        def round_trip(
            tokens: jax.Array, ids: jax.Array, weights: jax.Array, group: Any = group
        ) -> jax.Array:
            dispatched = jax_ep.dispatch(group, tokens, ids)
            return jax_ep.combine(group, dispatched.tokens, dispatched, weights)

        calls[f"{name} dispatch"] = (on_mesh(dispatch), (tokens, ids))
        calls[f"{name} round trip"] = (on_mesh(round_trip), (tokens, ids, weights))

    shapes = jax.tree.leaves(jax.eval_shape(calls["host dispatch"][0], tokens, ids))

    def as_many(tokens: jax.Array, ids: jax.Array) -> list[jax.Array]:
        one = ids[0, 0] + 1
        return [jnp.full(x.shape, one.astype(x.dtype)) for x in shapes]

    calls["as many results"] = (on_mesh(as_many), (tokens, ids))
    return calls


def measure(
    calls: dict[str, tuple[Callable, tuple]], n_batches: int
) -> dict[str, dict]:
    """Microseconds per call, each waited for; batches of the calls interleave."""
    batch = 50
    times: dict[str, list[float]] = {name: [] for name in calls}
    for function, args in calls.values():
        jax.block_until_ready(function(*args))
    for _ in range(n_batches):
        for name, (function, args) in calls.items():
            start = time.perf_counter()
            for _ in range(batch):
                jax.block_until_ready(function(*args))
            times[name].append((time.perf_counter() - start) / batch * 1e6)
    return {
        name: {
            "median_us": round(float(np.median(values)), 2),
            "min_us": round(min(values), 2),
            "max_us": round(max(values), 2),
            "n": len(values) * batch,
        }
        for name, values in times.items()
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    result = measure(make_calls(), request["n_batches"])
    pathlib.Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
