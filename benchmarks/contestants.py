"""Who competes: one interface for the package's transports and the rivals.

A contestant has `dispatch(tokens, topk_ids)`, whose result has the contract's fields,
and `combine(rows, dispatched, topk_weights)`. All operations are built from these two,
the same way for everybody, and run inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import jax_ep
from bench_cases import N_EXPERTS, N_RANKS, OURS, TOP_K, Case
from lax_grouping import Shapes
from lax_pipelines import PIPELINES

AXIS = "ep"


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Two functions of one rank's arrays."""

    name: str
    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]


def make_contestants(mesh: jax.sharding.Mesh, case: Case) -> list[Contestant]:
    """`host`, `xla` and the rivals, for one case."""
    transports = [_transport(mesh, case, name) for name in (OURS, "xla")]
    return transports + [_rival(case, name) for name in PIPELINES]


def _transport(mesh: jax.sharding.Mesh, case: Case, name: str) -> Contestant:
    config = jax_ep.EPConfig(
        n_experts=N_EXPERTS,
        top_k=TOP_K,
        hidden_size=case.hidden_size,
        max_tokens_per_rank=case.n_tokens,
        token_format=jax_ep.Plain(jnp.dtype(case.dtype)),
        combine_dtype=jnp.dtype(case.dtype),
        recv_capacity=case.n_rows,
    )
    group = jax_ep.ep_init(mesh, AXIS, config, transport=name)
    return Contestant(
        name,
        dispatch=lambda *args: jax_ep.dispatch(group, *args),
        combine=lambda *args: jax_ep.combine(group, *args),
    )


def _rival(case: Case, name: str) -> Contestant:
    shapes = Shapes(
        axis_name=AXIS,
        n_ranks=N_RANKS,
        n_tokens=case.n_tokens,
        n_experts=N_EXPERTS,
        top_k=TOP_K,
        capacity=case.n_rows,
    )
    pipeline = PIPELINES[name]
    return Contestant(
        name,
        dispatch=lambda *args: pipeline.dispatch(shapes, *args),
        combine=lambda *args: pipeline.combine(shapes, *args),
    )


def make_operations(who: Contestant, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Jitted functions of the global arrays, by operation.

    Results of one rank get a leading axis of 1, so that all can be sharded alike.
    """

    def dispatch(tokens: jax.Array, topk_ids: jax.Array) -> Any:
        return _add_axis(who.dispatch(tokens, topk_ids))

    def combine(dispatched: Any, rows: jax.Array, weights: jax.Array) -> jax.Array:
        dispatched = jax.tree.map(lambda x: x[0], dispatched)
        return who.combine(rows[0], dispatched, weights)

    def round_trip(
        tokens: jax.Array, topk_ids: jax.Array, weights: jax.Array, passes: jax.Array
    ) -> jax.Array:
        dispatched = who.dispatch(tokens, topk_ids)
        rows = _expert(dispatched.tokens, passes[0])
        return who.combine(rows, dispatched, weights)

    def round_trip_grad(
        tokens: jax.Array,
        topk_ids: jax.Array,
        weights: jax.Array,
        passes: jax.Array,
        cotangents: jax.Array,
    ) -> tuple:
        def forward(tokens: jax.Array, weights: jax.Array) -> jax.Array:
            return round_trip(tokens, topk_ids, weights, passes)

        out, backward = jax.vjp(forward, tokens, weights)
        return out, backward(cotangents)

    functions = {
        "dispatch": dispatch,
        "combine": combine,
        "round trip": round_trip,
        "round trip + grad": round_trip_grad,
    }
    return {name: _on_mesh(function, mesh) for name, function in functions.items()}


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _on_mesh(function: Callable, mesh: jax.sharding.Mesh) -> Any:
    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )


@jax.custom_vjp
def _expert(rows: jax.Array, passes: jax.Array) -> jax.Array:
    """The identity, as `passes` is 0; but XLA does not know, so rows must be there.

    Without it XLA would fuse a rival's dispatch into its combine, and no rows would
    ever be written, which no real expert allows. Costs nothing: the loop's array is
    not copied.
    """

    def body(state: tuple) -> tuple:
        rows, passes = state
        return rows * 2, passes - 1

    return lax.while_loop(lambda state: state[1] > 0, body, (rows, passes))[0]


_expert.defvjp(
    lambda rows, passes: (_expert(rows, passes), passes),
    lambda passes, d_rows: (_expert(d_rows, passes), None),
)
