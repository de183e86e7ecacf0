"""Who competes on GPUs: the package's transport and plain `jax.lax`.

One interface for all: `dispatch(tokens, topk_ids, topk_weights)`, whose result has the
contract's fields, and `combine(rows, dispatched, topk_weights)`; inside a
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import jax_ep
from gpu import lax_all_gather, lax_ragged
from gpu.cases import Case
from lax_grouping import Shapes

AXIS = "ep"

#: The package, with the weights at the source, and with the weights travelling along.
OURS = ("jax_ep", "jax_ep, row_weights")
RIVALS = {"lax all_gather": lax_all_gather, "lax ragged_all_to_all": lax_ragged}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Two functions of one rank's arrays; `close` when all is measured."""

    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]
    close: Callable[[], None] = lambda: None


def make_contestant(
    name: str, mesh: jax.sharding.Mesh, case: Case, transport: str
) -> Contestant:
    """By name, of `OURS` or `RIVALS`; `transport` is the package's."""
    if name in RIVALS:
        return _rival(name, case)
    return _package(mesh, case, transport, row_weights=name != OURS[0])


def _package(
    mesh: jax.sharding.Mesh, case: Case, transport: str, row_weights: bool
) -> Contestant:
    config = jax_ep.EPConfig(
        n_experts=case.n_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        max_tokens_per_rank=case.n_tokens,
        recv_capacity=case.n_rows,
    )
    group = jax_ep.ep_init(mesh, AXIS, config, transport=transport)

    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        return jax_ep.dispatch(group, tokens, ids, weights if row_weights else None)

    def combine(rows: jax.Array, dispatched: Any, weights: jax.Array) -> jax.Array:
        weights = None if row_weights else weights
        return jax_ep.combine(group, rows, dispatched, weights)

    return Contestant(dispatch, combine, group.close)


def _rival(name: str, case: Case) -> Contestant:
    pipeline = RIVALS[name]
    shapes = Shapes(
        axis_name=AXIS,
        n_ranks=case.n_ranks,
        n_tokens=case.n_tokens,
        n_experts=case.n_experts,
        top_k=case.top_k,
        capacity=case.n_rows,
    )

    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        return pipeline.dispatch(shapes, tokens, ids)

    def combine(rows: jax.Array, dispatched: Any, weights: jax.Array) -> jax.Array:
        return pipeline.combine(shapes, rows, dispatched, weights)

    return Contestant(dispatch, combine)
