"""The inter-node exchange: what travels over the rails, and gradients with defined bits.

Each rank brings T tokens; arrays of the tokens of all N nodes are ordered by node. Rails have no
derivatives, so the rules below are made of functions that have rules. Where a function takes
`group_ids`, `int32[T, N_c]` of this rank's choices, and `node_ids`, `int32[N * T, N_c]` from
`route_within`, these say which rows need not travel.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange.operands import DISPATCH_NAME
from jax_ep.formats.bits import as_integers
from jax_ep.nodes.rails import Rails
from jax_ep.nodes.routing import choices_of_nodes, needs, node_of


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(
    rails: Rails, tokens: jax.Array, group_ids: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The operands of a dispatch from all nodes: tokens, ids of `route_within`, and weights.

    `[N * T, H]`, `int32[N * T, N_c]` and `float32[N * T, N_c]`, from `[T, H]` and `[T, N_c]`. The
    gradients are those of `all_gather_tokens` and `all_gather_weights`; encoded tokens have none.
    """
    node_ids, all_weights, all_tokens = rails.gather(group_ids, weights, tokens)
    assert all_tokens is not None
    return all_tokens, node_ids, all_weights


def _gather_fwd(rails: Rails, tokens: Any, group_ids: Any, weights: Any) -> Any:
    all_tokens, node_ids, all_weights = gather(rails, tokens, group_ids, weights)
    # Named here, where policies of `jax.checkpoint` see it: the backward need not gather again.
    node_ids = checkpoint_name(node_ids, DISPATCH_NAME)
    return (all_tokens, node_ids, all_weights), (group_ids, node_ids)


def _gather_bwd(rails: Rails, ids: Any, cotangents: Any) -> Any:
    tokens, _, weights = cotangents
    weights = None if weights is None else all_to_all_rows(rails, weights, *ids)
    if tokens.dtype == jax.dtypes.float0:  # codes.py
        return None, None, weights
    return reduce_scatter_sums(rails, tokens, None, *ids), None, weights


gather.defvjp(_gather_fwd, _gather_bwd)


def gather_choices(
    rails: Rails, group_ids: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The ids and weights of `gather`, without the tokens."""
    node_ids, all_weights = _gather_choices(rails, group_ids, weights)
    # Also where no weight has a gradient, and so no rule below is used.
    return checkpoint_name(node_ids, DISPATCH_NAME), all_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_choices(
    rails: Rails, group_ids: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    return rails.gather(group_ids, weights, None)[:2]


def _gather_choices_fwd(rails: Rails, group_ids: Any, weights: Any) -> Any:
    node_ids, all_weights = _gather_choices(rails, group_ids, weights)
    node_ids = checkpoint_name(node_ids, DISPATCH_NAME)
    return (node_ids, all_weights), (group_ids, node_ids)


def _gather_choices_bwd(rails: Rails, ids: Any, cotangents: Any) -> Any:
    weights = cotangents[1]
    return None, None if weights is None else all_to_all_rows(rails, weights, *ids)


_gather_choices.defvjp(_gather_choices_fwd, _gather_choices_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduce_scatter_sums(
    rails: Rails,
    node_sums: jax.Array,
    residual: jax.Array | None,
    group_ids: jax.Array,
    node_ids: jax.Array,
) -> jax.Array:
    """`Rails.reduce_scatter`."""
    return rails.reduce_scatter(node_sums, residual, node_ids)


def _reduce_scatter_sums_bwd(rails: Rails, saved: Any, cotangent: Any) -> Any:
    has_residual, *ids = saved
    gathered = all_gather_tokens(rails, cotangent, *ids)
    return gathered, cotangent if has_residual else None, None, None


reduce_scatter_sums.defvjp(
    lambda rails, sums, residual, *ids: (
        reduce_scatter_sums(rails, sums, residual, *ids),
        (residual is not None, *ids),
    ),
    _reduce_scatter_sums_bwd,
)


def _with_transpose(transpose: Callable[..., jax.Array]) -> Callable[..., Callable[..., Any]]:
    """Gives `f(rails, x, group_ids, node_ids)`, linear in x, a backward: `transpose`, alike."""

    def decorate(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        linear = jax.custom_vjp(f, nondiff_argnums=(0,))
        linear.defvjp(
            lambda rails, x, *ids: (linear(rails, x, *ids), ids),
            lambda rails, ids, cotangent: (transpose(rails, cotangent, *ids), None, None),
        )
        return linear

    return decorate


@_with_transpose(lambda rails, cotangent, *ids: reduce_scatter_sums(rails, cotangent, None, *ids))
def all_gather_tokens(
    rails: Rails, tokens: jax.Array, group_ids: jax.Array, node_ids: jax.Array
) -> jax.Array:
    """The tokens of all nodes, `[N * T, H]`, from `[T, H]`; undefined where none is for this node.

    The gradient is the sum of the nodes' gradients in node order, rounded once.
    """
    return rails.all_gather(tokens, needs(rails.geometry, group_ids))


def _choose(rails: Rails, cotangent: jax.Array, *ids: jax.Array) -> jax.Array:
    return all_to_all_rows(rails, cotangent, *ids)


@_with_transpose(_choose)
def all_gather_weights(
    rails: Rails, weights: jax.Array, group_ids: jax.Array, node_ids: jax.Array
) -> jax.Array:
    """The values of all nodes' choices, `[N * T, N_c, ...]`, from `[T, N_c, ...]`.

    A weight, or a row; rows are undefined for choices of other nodes. The gradient of a choice
    comes from the node that has its group.
    """
    is_row = weights.ndim > 2
    return rails.all_gather(
        weights, choices_of_nodes(rails.geometry, group_ids) if is_row else None
    )


@_with_transpose(all_gather_weights)
def all_to_all_rows(
    rails: Rails, rows: jax.Array, group_ids: jax.Array, node_ids: jax.Array
) -> jax.Array:
    """The values of this rank's choices, `[T, N_c, ...]`, each from the node that has its group.

    From `[N * T, N_c, ...]`, of all nodes' choices; zero for those of other nodes.
    """
    parts = rails.all_to_all(rows, node_ids >= 0 if rows.ndim > 2 else None)
    owners = jnp.clip(node_of(rails.geometry, group_ids), 0, rails.geometry.routed.n_nodes - 1)
    index = owners.reshape(1, *owners.shape, *[1] * (parts.ndim - 3))
    integers = jnp.take_along_axis(as_integers(parts), index, axis=0)[0]
    return lax.bitcast_convert_type(integers, parts.dtype)
