"""Routing on several nodes: which nodes need a token, and the groups of its choices inside a node.

The same in C++: ffi/nvshmem/plan/rail_call.h.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.routing import INVALID, NO_GROUP
from jax_ep.geometry import Geometry


def _node(geometry: Geometry) -> jax.Array:
    """This rank's node, `int32[]`."""
    return lax.axis_index(geometry.axis_name) // geometry.routed.n_ranks_per_node


def node_of(geometry: Geometry, group_ids: jax.Array) -> jax.Array:
    """The node that has each choice's group; some other number if there is none."""
    routed = geometry.routed
    return group_ids // (routed.n_local_groups * routed.n_ranks_per_node)


def choices_of_nodes(geometry: Geometry, group_ids: jax.Array) -> jax.Array:
    """`bool[N, T, N_c]`: whether a choice names a group of the node."""
    nodes = jnp.arange(geometry.routed.n_nodes, dtype=jnp.int32)[:, None, None]
    return node_of(geometry, group_ids)[None] == nodes


def needs(geometry: Geometry, group_ids: jax.Array) -> jax.Array:
    """`bool[N, T]`: whether a node needs a token."""
    return choices_of_nodes(geometry, group_ids).any(axis=2)


def route_within(geometry: Geometry, all_ids: jax.Array) -> jax.Array:
    """The ids by which this node routes the tokens of all nodes, `int32[N * T, N_c]`.

    -1 for choices of other nodes' experts. Invalid ids stay invalid at their own node, which counts
    them.

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
