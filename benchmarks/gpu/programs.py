"""The jitted functions that are timed, built the same way for every contestant."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpu.contestants import AXIS, Contestant


def dispatch(who: Contestant) -> Callable[..., Any]:
    """One dispatch. Results of one rank get a leading axis of 1, to be sharded."""

    def run(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        return _add_axis(who.dispatch(tokens, ids, weights))

    return run


def combine(who: Contestant) -> Callable[..., Any]:
    """One combine of `rows`, with the other results of a dispatch."""

    def run(dispatched: Any, rows: jax.Array, weights: jax.Array) -> jax.Array:
        dispatched = jax.tree.map(lambda x: x[0], dispatched)
        return who.combine(rows[0], dispatched, weights)

    return run


def chain(who: Contestant, n_pairs: int) -> Callable[..., Any]:
    """Dispatch and combine in turn; what combine gives are the next tokens.

    So every call waits for the former, and there is nothing else to run.
    """

    def run(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        for _ in range(n_pairs):
            dispatched = who.dispatch(tokens, ids, weights)
            tokens = who.combine(dispatched.tokens, dispatched, weights)
        return tokens

    return run


def loop(who: Contestant, n_pairs: int) -> Callable[..., Any]:
    """As `chain`, in a loop: compiled once where a pair is many kernels.

    The barrier keeps XLA from fusing a combine with its dispatch.
    """

    def run(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        def pair(_: Any, tokens: jax.Array) -> jax.Array:
            dispatched = who.dispatch(tokens, ids, weights)
            rows = lax.optimization_barrier(dispatched.tokens)
            return who.combine(rows, dispatched, weights)

        return lax.fori_loop(0, n_pairs, pair, tokens)

    return run


def rotation(who: Contestant) -> Callable[..., Any]:
    """A dispatch of each set of inputs, then their combines.

    No tokens are in the cache; rows are, if those of all sets fit there. A call waits
    for the former through its `topk_ids`, to which a 0 is added that XLA cannot
    foresee.
    """

    def run(sets: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        zero, received, outs = jnp.int32(0), [], []
        for tokens, ids, weights in sets:
            received.append(who.dispatch(tokens, ids + zero, weights))
            zero = received[-1].n_dropped
        for (_, _, weights), dispatched in zip(sets, received, strict=True):
            dispatched = replace(dispatched, topk_ids=dispatched.topk_ids + zero)
            outs.append(who.combine(dispatched.tokens, dispatched, weights))
            zero = (outs[-1][0, 0].astype(jnp.float32) * 0).astype(jnp.int32)
        return outs

    return run


def examine(rows: jax.Array, row_offsets: jax.Array, sample: jax.Array) -> Any:
    """The expert of the checks, and some rows as they came.

    Returns:
        `[1, C, H]`: rows times `expert_factor`, NaN where not in use; `[1, S, H]`.
    """
    rows, ends = rows[0], row_offsets[0, 1:].astype(jnp.int32)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    local = jnp.searchsorted(ends, row, side="right", method="scan_unrolled")
    expert = local.astype(jnp.int32) + lax.axis_index(AXIS) * ends.size
    factor = 0.5 + (expert % 4).astype(rows.dtype)
    out = jnp.where((row < ends[-1])[:, None], rows * factor[:, None], jnp.nan)
    return out[None], rows[sample[0]][None]


def flush(x: jax.Array) -> jax.Array:
    """Reads and writes an array that is larger than the cache."""
    return x + 1


def replace(dispatched: Any, **fields: Any) -> Any:
    """With other fields, of the package's `Dispatched` or a rival's `Received`."""
    if dataclasses.is_dataclass(dispatched):
        return dataclasses.replace(dispatched, **fields)
    return dispatched._replace(**fields)


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Any:
    """Jitted function of arrays that are sharded along their first axis."""
    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    sharding = NamedSharding(mesh, spec)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding)


def compile_all(programs: dict[str, tuple[Any, tuple]]) -> dict[str, Any]:
    """Compiles `{name: (jitted function, arguments or their shapes)}`, side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        tasks = {
            name: pool.submit(lambda f=function, a=args: f.lower(*a).compile())
            for name, (function, args) in programs.items()
        }
        return {name: task.result() for name, task in tasks.items()}


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
