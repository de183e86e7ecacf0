"""Overlap of asynchronous calls with a dense layer: how much of a call it hides, at what cost.

Chains of these steps give the periods of a call alone, of the layer alone, and of both at the same
time. Each call and each layer waits for those of the step before.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

import jax_ep
from case import Case
from implementations import Implementation
from programs import Step, on_mesh


def make_matrices(mesh: Mesh, case: Case) -> tuple[jax.Array, ...]:
    """Returns the layer's matrices, `[R, H, width]` and `[R, width, H]`, equal on all ranks."""
    shapes = (case.hidden_size, case.width), (case.width, case.hidden_size)

    def make():
        keys = jax.random.split(jax.random.key(3))
        return tuple(
            (jax.random.normal(key, shape) / shape[0] ** 0.5).astype(jnp.bfloat16)[None]
            for key, shape in zip(keys, shapes, strict=True)
        )

    return on_mesh(mesh, make)()


def _layer(x, matrices):
    up, down = (matrix[0] for matrix in matrices)
    return lax.tanh(lax.tanh(x @ up) @ down)


def _dispatch(ours: Implementation, *, with_layer: bool = False) -> Step:
    """A dispatch, alone or beside the layer. The state is the tokens and the layer's operand."""

    def next(y, ids, weights, matrices, hide):
        if not with_layer:
            return y, ours.dispatch(y, ids, weights).n_dropped
        flight = jax_ep.dispatch_async(ours.group, y, ids, weights)
        y = _layer(flight.then(y), matrices)
        return y, jax_ep.dispatch_wait(ours.group, flight, after=y).n_dropped

    return Step(next)


def _combine(ours: Implementation, *, with_layer: bool = False) -> Step:
    """A combine, alone or beside the layer. The state is the layer's operand and the rows."""

    def start(tokens, ids, weights):
        if not with_layer:
            return tokens, ours.dispatch(tokens, ids, weights)
        flight = jax_ep.dispatch_async(ours.group, tokens, ids, weights)
        y = jnp.sin(flight.then(tokens))
        return tokens, jax_ep.dispatch_wait(ours.group, flight, after=y)

    def next(state, ids, weights, matrices, hide):
        y, rows = state
        if not with_layer:
            return state, ours.combine(rows.tokens, rows, weights)
        flight = jax_ep.combine_async(ours.group, rows.tokens, rows)
        y = _layer(flight.then(y), matrices)
        return (y, rows), jax_ep.combine_wait(ours.group, flight, after=y)

    return Step(next, start)


def _gradients(ours: Implementation, form: str) -> Step:
    """Gradients of a dispatch and a combine with the dense layer at each, and the identity between.

    `form`: "sync", one after the other; "then", overlap in the forward; "overlap", in both.
    """

    def beside(in_flight, y, matrices):
        if form == "overlap":
            return in_flight.overlap(lambda y: _layer(y, matrices), y)
        return _layer(in_flight.then(y), matrices)

    def layer(tokens, ids, weights, matrices):
        if form == "sync":
            rows = ours.dispatch(tokens, ids, weights)
            y = _layer(tokens, matrices)
            return ours.combine(rows.tokens, rows, weights) + _layer(y, matrices)
        flight = jax_ep.dispatch_async(ours.group, tokens, ids, weights)
        y = beside(flight, tokens, matrices)
        rows = jax_ep.dispatch_wait(ours.group, flight, after=y)
        flight = jax_ep.combine_async(ours.group, rows.tokens, rows)
        z = beside(flight, y, matrices)
        return jax_ep.combine_wait(ours.group, flight, after=z) + z

    def next(tokens, ids, weights, matrices, hide):
        out, pull = jax.vjp(lambda *x: layer(x[0], ids, *x[1:]), tokens, weights, matrices)
        of_tokens, *others = pull(out)
        return of_tokens, others

    return Step(next)


# Steps by the name of the operation; the package gets the weights at dispatch.
STEPS: dict[str, Callable[[Implementation], Step]] = {
    "dense": lambda _: Step(lambda y, ids, weights, m, hide: (_layer(y, m), ())),
    "dispatch": _dispatch,
    "combine": _combine,
    "dispatch + dense": lambda ours: _dispatch(ours, with_layer=True),
    "combine + dense": lambda ours: _combine(ours, with_layer=True),
    "both + dense + grad": functools.partial(_gradients, form="sync"),
    "both + dense + grad, then": functools.partial(_gradients, form="then"),
    "both + dense + grad, overlap": functools.partial(_gradients, form="overlap"),
}
