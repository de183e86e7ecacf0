"""The jitted functions that are timed, built in the same way for every implementation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import timing
from implementations import AXIS, Implementation


def hide(tree: Any, passes: jax.Array, on_gpu: bool) -> Any:
    """The identity, hidden from XLA; each result depends on all operands.

    On GPUs it is an optimization barrier, which XLA keeps until it has fused and scheduled. XLA:CPU
    drops barriers earlier, so there it is a loop with `passes` = 0 iterations, which copies only
    operands that have other uses. (On a GPU, a loop would wait for the host.)
    """
    if on_gpu:
        return lax.optimization_barrier(tree)

    def body(state):
        return jax.tree.map(lambda x: x + x, state[0]), state[1] - 1

    return lax.while_loop(lambda state: state[1] > 0, body, (tree, passes))[0]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a chain, which repeats it.

    Attributes:
        next: takes `(state, ids, weights, parameters, hide)`; returns the next state and further
            results. This `hide` takes one argument, a tree.
        start: takes `(tokens, ids, weights)`; returns the first state.

    Where routings are empty, neither takes ids and weights.
    """

    next: Callable[..., tuple[Any, Any]]
    start: Callable[..., Any] = lambda tokens, *routing: tokens


def chain(step: Step, n: int, on_gpu: bool) -> Callable[..., Any]:
    """Makes a chain of `n` steps, which returns an array of the last state and all steps' results.

    The operands of a step depend on the state and the results of the step before it, so XLA can
    neither merge, hoist nor overlap steps. Steps take turns with the routings.
    """

    def run(tokens, routings, parameters, passes):
        def hidden(tree):
            return hide(tree, passes[0], on_gpu)

        state, last, results = step.start(tokens, *routings[0]), (), []
        for i in range(n):
            operands = (state, *routings[i % len(routings)])
            operands, last = hidden((operands, last))
            results.append(last)
            state, last = step.next(*operands, parameters, hidden)
        results.append(last)
        return jax.tree.leaves(state)[0], add_axis(results[1:])

    return run


def round_trip(implementation: Implementation) -> Step:
    """A dispatch, the identity in place of the experts, and a combine. The state is the tokens."""

    def next(tokens, ids, weights, parameters, hide):
        dispatched = implementation.dispatch(tokens, ids, weights)
        rows = _expert(hide, dispatched.tokens)
        out = implementation.combine(rows, dispatched, weights)
        return out, {"row_offsets": dispatched.row_offsets}

    return Step(next)


def with_gradients(forward: Step) -> Step:
    """A step, then its gradients in all its floats, with its result as the cotangent."""

    def next(tokens, ids, weights, parameters, hide):
        def of_floats(tokens, weights, parameters):
            return forward.next(tokens, ids, weights, parameters, hide)

        out, backward, results = jax.vjp(of_floats, tokens, weights, parameters, has_aux=True)
        d_tokens, d_weights, d_parameters = backward(out)
        parts = [d[:1, :1] for d in hide(d_parameters)] if parameters else []
        return d_tokens, {**results, "d_weights": d_weights, "d_parameters": parts}

    return Step(next)


def _expert(hide: Callable[[Any], Any], rows: jax.Array) -> jax.Array:
    """The identity, forward and backward.

    Without it XLA would fuse a baseline's dispatch into its combine and never write the
    rows, which every real expert needs.
    """
    expert = jax.custom_vjp(hide)
    expert.defvjp(lambda rows: (hide(rows), None), lambda _, d_rows: (hide(d_rows),))
    return expert(rows)


# Steps of an implementation, by the name of the operation.
STEPS: dict[str, Callable[[Implementation], Step]] = {
    "round trip": round_trip,
    "round trip + grad": lambda implementation: with_gradients(round_trip(implementation)),
}


def dispatch(implementation: Implementation) -> Callable[..., Any]:
    """Makes a function of one dispatch."""
    return lambda *operands: add_axis(implementation.dispatch(*operands))


def combine(implementation: Implementation) -> Callable[..., Any]:
    """Makes a function of one combine, of `rows` and the other results of a dispatch."""

    def run(dispatched, rows, weights):
        dispatched = jax.tree.map(lambda x: x[0], dispatched)
        return implementation.combine(rows[0], dispatched, weights)

    return run


def rotation(implementation: Implementation, on_gpu: bool, combines: bool) -> Callable[..., Any]:
    """Makes a function that dispatches each set of inputs and then, if `combines`, combines each.

    For the kernel clock: no tokens are in the L2 cache. The rows that combine reads are, if those
    of all sets fit.
    """

    def run(sets, passes):
        dispatched, outs, last = [], [], ()
        for operands in sets:
            operands, last = hide((operands, last), passes[0], on_gpu)
            dispatched.append(implementation.dispatch(*operands))
            last = dispatched[-1].n_dropped
        for (_, _, weights), rows in zip(sets, dispatched, strict=True):
            if combines:
                rows, last = hide((rows, last), passes[0], on_gpu)
                outs.append(implementation.combine(rows.tokens, rows, weights))
                last = outs[-1]
        return outs or [rows.n_dropped[None] for rows in dispatched]

    return run


def add_axis(tree: Any) -> Any:
    """Adds a leading axis of size 1, so that even scalars can be sharded."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def compiled(
    mesh: Mesh, body: Callable[..., Any], args: tuple, options: dict[str, Any] | None = None
) -> timing.Call:
    """Compiles a function of arrays that are sharded along their first axis."""
    return on_mesh(mesh, body).lower(*args).compile(compiler_options=options), args


def on_host(array: jax.Array) -> np.ndarray:
    """The entries of an array that are on this process's devices, along its first axis."""
    if array.is_fully_addressable:
        return np.asarray(array)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Any:
    """Jits a function of arrays that are sharded along their first axis."""
    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    # Chains of different lengths take the same arguments, used or not.
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding, keep_unused=True)
