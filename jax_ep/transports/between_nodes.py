"""The exchange between nodes, in plain `jax.lax` collectives whose gradients have defined bits.

N nodes of P ranks: rank `n * P + g` is rank g of node n. The ranks of one index g, one per node,
exchange arrays with each other; each has T tokens, and arrays of all of them are ordered by node.
Arrays travel as integers, because XLA:CPU converts bfloat16 to float32 and back, which changes
NaNs. Integers have no derivative, so the rules below are made of functions that have rules.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.geometry import Geometry
from jax_ep.routing import INVALID, NO_GROUP
from jax_ep.transports.rounding import in_float32


def _rails(geometry: Geometry) -> list[list[int]]:
    """The ranks of each index, by node."""
    per_node, n_nodes = geometry.routed.n_ranks_per_node, geometry.routed.n_nodes
    return [[n * per_node + g for n in range(n_nodes)] for g in range(per_node)]


def _node(geometry: Geometry) -> jax.Array:
    """This rank's node, `int32[]`."""
    return lax.axis_index(geometry.axis_name) // geometry.routed.n_ranks_per_node


def _as_integers(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _spread(geometry: Geometry, x: jax.Array) -> jax.Array:
    """`[N * T, ...]` of all nodes, from `[T, ...]` of each."""
    rails = _rails(geometry)
    integers = lax.all_gather(_as_integers(x), geometry.axis_name, axis_index_groups=rails)
    return lax.bitcast_convert_type(integers, x.dtype).reshape(-1, *x.shape[1:])


def _collect(geometry: Geometry, x: jax.Array) -> jax.Array:
    """`[N, T, ...]`, each node's part for this rank, from `[N * T, ...]` for all nodes."""
    parts = _as_integers(x).reshape(geometry.routed.n_nodes, -1, *x.shape[1:])
    return lax.bitcast_convert_type(_all_to_all(geometry, parts), x.dtype)


def _all_to_all(geometry: Geometry, parts: jax.Array) -> jax.Array:
    """`[N, ...]` by destination to `[N, ...]` by source.

    JAX cannot map `lax.all_to_all` with groups of ranks, so mapped axes become the last ones.
    """
    rails = _rails(geometry)

    @jax.custom_batching.custom_vmap
    def exchange(parts: jax.Array) -> jax.Array:
        return lax.all_to_all(parts, geometry.axis_name, 0, 0, axis_index_groups=rails)

    @exchange.def_vmap
    def exchange_mapped(_size: int, _is_mapped: Any, parts: jax.Array) -> tuple[jax.Array, bool]:
        return jnp.moveaxis(exchange(jnp.moveaxis(parts, 0, -1)), -1, 0), True

    return exchange(parts)


def _sum_nodes(parts: jax.Array) -> jax.Array:
    """float32 `[T, H]`: the sum of `[N, T, H]` in node order, starting from +0."""
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    # XLA drops "0 +". A sum that starts at +0 is never -0.
    return total + jnp.where(total == 0, -total, jnp.zeros_like(total))


def _of_owner(geometry: Geometry, parts: jax.Array, group_ids: jax.Array) -> jax.Array:
    """`[T, N_c, ...]`: of each choice, the part from the node that has its group.

    `parts` is `[N, T, N_c, ...]` for N_c choices; it is zero everywhere for choices without a row.
    """
    routed = geometry.routed
    ranks = group_ids // routed.n_local_groups
    owners = jnp.clip(ranks // routed.n_ranks_per_node, 0, routed.n_nodes - 1)
    index = owners.reshape(1, *owners.shape, *[1] * (parts.ndim - 3))
    integers = jnp.take_along_axis(_as_integers(parts), index, axis=0)[0]
    return lax.bitcast_convert_type(integers, parts.dtype)


def route_within(geometry: Geometry, all_ids: jax.Array) -> jax.Array:
    """The ids by which this node routes the tokens of all nodes, `int32[N * T, N_c]`.

    -1 for choices of other nodes' experts. Invalid ids stay invalid at their own node, which counts
    them.

    Args:
        geometry: of all nodes.
        all_ids: `int32[N * T, N_c]`, group ids of all nodes' tokens.
    """
    routed, node = geometry.routed, _node(geometry)
    n_local, per_node, n_nodes = routed.n_local_groups, routed.n_ranks_per_node, routed.n_nodes
    source = jnp.arange(n_nodes, dtype=jnp.int32).repeat(all_ids.shape[0] // n_nodes)[:, None]
    is_group = (all_ids >= 0) & (all_ids < routed.n_groups)
    ids = jnp.where(is_group, all_ids, 0)
    rank, local = ids // n_local, ids % n_local
    within = (rank % per_node * n_local + local) * n_nodes + source
    counts_as_invalid = ~is_group & (all_ids != NO_GROUP) & (source == node)
    elsewhere = jnp.where(counts_as_invalid, INVALID, NO_GROUP)
    return jnp.where(is_group & (rank // per_node == node), within, elsewhere)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread_tokens(geometry: Geometry, tokens: jax.Array) -> jax.Array:
    """The tokens of all nodes, `[N * T, H]`, from `[T, H]`.

    The gradient is the sum of the nodes' gradients in node order, rounded once.
    """
    return _spread(geometry, tokens)


def _spread_tokens_fwd(geometry: Geometry, tokens: jax.Array) -> tuple[jax.Array, None]:
    return spread_tokens(geometry, tokens), None


def _spread_tokens_bwd(geometry: Geometry, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (collect_sums(geometry, cotangent, None),)


spread_tokens.defvjp(_spread_tokens_fwd, _spread_tokens_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread_choices(
    geometry: Geometry, group_ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ids and weights of all nodes' choices, `[N * T, N_c]` each, from `[T, N_c]`.

    In one collective. The gradient of a weight comes from the node that has the choice's row.
    """
    packed = jnp.concatenate([group_ids, lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    all_ids, all_weights = jnp.split(_spread(geometry, packed), 2, axis=1)
    return all_ids, lax.bitcast_convert_type(all_weights, weights.dtype)


def _spread_choices_fwd(
    geometry: Geometry, group_ids: jax.Array, weights: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    return spread_choices(geometry, group_ids, weights), group_ids


def _spread_choices_bwd(
    geometry: Geometry, group_ids: jax.Array, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[None, jax.Array]:
    return None, collect_rows(geometry, cotangents[1], group_ids)


spread_choices.defvjp(_spread_choices_fwd, _spread_choices_bwd)


def spread_ids(geometry: Geometry, group_ids: jax.Array) -> jax.Array:
    """Ids of all nodes' choices, `int32[N * T, N_c]`, from `int32[T, N_c]`."""
    return _spread(geometry, group_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread_weights(geometry: Geometry, group_ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Like `spread_choices` where the ids of all nodes are known."""
    return _spread(geometry, weights)


def _spread_weights_fwd(
    geometry: Geometry, group_ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return spread_weights(geometry, group_ids, weights), group_ids


def _spread_weights_bwd(
    geometry: Geometry, group_ids: jax.Array, cotangent: jax.Array
) -> tuple[None, jax.Array]:
    return None, collect_rows(geometry, cotangent, group_ids)


spread_weights.defvjp(_spread_weights_fwd, _spread_weights_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect_sums(geometry: Geometry, node_sums: jax.Array, residual: jax.Array | None) -> jax.Array:
    """The sum of each token's node sums, in node order, then the residual; rounded once.

    Args:
        geometry: of all nodes.
        node_sums: `[N * T, H]`, this node's sums for the tokens of all nodes.
        residual: `[T, H]` or None, in the same dtype.

    Returns:
        `[T, H]` in that dtype.
    """
    total = _sum_nodes(_collect(geometry, node_sums))
    if residual is not None:
        total = total + in_float32(residual)
    return total.astype(node_sums.dtype)


def _collect_sums_fwd(
    geometry: Geometry, node_sums: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, bool]:
    return collect_sums(geometry, node_sums, residual), residual is not None


def _collect_sums_bwd(
    geometry: Geometry, has_residual: bool, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    return spread_tokens(geometry, cotangent), cotangent if has_residual else None


collect_sums.defvjp(_collect_sums_fwd, _collect_sums_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect_rows(geometry: Geometry, rows: jax.Array, group_ids: jax.Array) -> jax.Array:
    """The row of each choice of this rank, `[T, N_c, H]`, from the node that has it.

    Args:
        geometry: of all nodes.
        rows: `[N * T, N_c, H]`, the rows of all nodes' choices; zero for those of other nodes.
        group_ids: `int32[T, N_c]` of this rank's choices.
    """
    return _of_owner(geometry, _collect(geometry, rows), group_ids)


def _collect_rows_fwd(
    geometry: Geometry, rows: jax.Array, group_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return collect_rows(geometry, rows, group_ids), group_ids


def _collect_rows_bwd(
    geometry: Geometry, group_ids: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    return spread_weights(geometry, group_ids, cotangent), None


collect_rows.defvjp(_collect_rows_fwd, _collect_rows_bwd)
