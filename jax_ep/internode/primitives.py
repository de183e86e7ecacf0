"""The primitives behind `nvshmem`: exchanges of rows between the ranks of a rail."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.geometry import Geometry
from jax_ep.operands.calls import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.xla_ffi.lowering import like, make_primitive, synchronous_cuda_call
from jax_ep.xla_ffi.primitives import (
    combine_attributes,
    combine_call,
    combine_types,
    coordinate,
    dispatch_attributes,
    dispatch_call,
    dispatch_types,
    present,
)


def bind_rail(
    geometry: Geometry, rows: jax.Array, *, by_node: bool, is_sent: jax.Array | None = None
) -> jax.Array:
    """Sends rows to all nodes of the rail.

    Args:
        geometry: within nodes.
        rows: `[n, W]`, for every node; or `[N * n, W]`, n for each. A row takes a multiple of 4
            bytes.
        by_node: whether `rows` has a part for each node.
        is_sent: `bool[N * n]`, whether to send a row to a node; None: all are sent. Those for this
            node always are.

    Returns:
        `[N * n, W]`, by the node that they come from. Rows that were not sent are undefined, or
        zero if `by_node`.
    """
    mask = None if is_sent is None else is_sent.astype(jnp.uint8)
    (result,) = rail_p.bind(
        coordinate(geometry),
        *present(mask, rows),
        geometry=geometry,
        has_mask=mask is not None,
        by_node=by_node,
    )
    return result


def bind_rail_gather(
    geometry: Geometry, group_ids: jax.Array, weights: jax.Array | None, tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Gives the choices of all tokens, routed within this node, and the tokens that it needs.

    Args:
        geometry: within nodes.
        group_ids: `int32[T, N_c]`, of this rank's choices among the groups of all nodes.
        weights: `float32[T, N_c]` or None.
        tokens: `[T, W]` or None.

    Returns:
        The same of all nodes: `int32[N * T, N_c]` as of `route_within`, `float32[N * T, N_c]` and
        `[N * T, W]`, of which tokens without choices here are undefined.
    """
    node_ids, *rest = rail_gather_p.bind(
        coordinate(geometry),
        *present(group_ids, weights, tokens),
        geometry=geometry,
        has_weights=weights is not None,
        has_tokens=tokens is not None,
    )
    all_weights = None if weights is None else rest.pop(0)
    return node_ids, all_weights, None if tokens is None else rest.pop(0)


def bind_rail_sum(
    geometry: Geometry, node_sums: jax.Array, residual: jax.Array | None, node_ids: jax.Array
) -> jax.Array:
    """Adds up the nodes' sums of this rank's tokens, then the residual: `[T, H]`.

    Args:
        geometry: within nodes.
        node_sums: `[N * T, H]`, this node's sums for the tokens of all nodes; zero for those
            without choices here.
        residual: `[T, H]` or None.
        node_ids: `int32[N * T, N_c]`, those of `bind_rail_gather`.
    """
    (result,) = rail_sum_p.bind(
        coordinate(geometry),
        *present(node_ids, node_sums, residual),
        geometry=geometry,
        has_residual=residual is not None,
    )
    return result


def bind_rail_dispatch(
    geometry: Geometry,
    operands: DispatchOperands,
    group_ids: jax.Array,
    handle_shape: tuple[int, ...],
) -> DispatchResults:
    """Sends tokens to all nodes of the rail, and dispatches those of all nodes inside this one.

    Args:
        geometry: within nodes.
        operands: of the dispatch inside the node, but with the tokens of this rank, `[T, W]`.
        group_ids: `int32[T, N_c]`, of this rank's choices, which say what nodes need a token.
        handle_shape: of the dispatch inside the node.
    """
    arrays, params = dispatch_call(geometry, operands, handle_shape)
    results = rail_dispatch_p.bind(*arrays, group_ids, **params)[:-2]
    return DispatchResults.of(results, params["has_weights"])


def bind_rail_combine(geometry: Geometry, operands: CombineOperands) -> list[jax.Array]:
    """Combines inside the node, and adds the sums of all nodes: `[T, H]`.

    The second result, if there are `row_scalars`, is `float32[N * T, N_c]`: those that the choices
    of all nodes' tokens have on this node.

    Args:
        geometry: within nodes.
        operands: of the combine inside the node, which is a sum; but with the residual of this
            rank, `[T, H]`.
    """
    arrays, params = combine_call(geometry, operands)
    return rail_combine_p.bind(*arrays, **params)


def _attributes(geometry: Geometry, **flags: bool) -> dict[str, Any]:
    """The attributes that a handler reads."""
    return dict(group=geometry.key, **{name: np.bool_(flag) for name, flag in flags.items()})


rail_p = make_primitive("jax_ep_rail", cuda=synchronous_cuda_call("jax_ep_rail", _attributes))


@rail_p.def_abstract_eval
def _rail_types(*operands: Any, geometry: Geometry, by_node: bool, **_: Any) -> Any:
    rows = operands[-1]
    return [rows if by_node else _of_all_nodes(geometry, rows)]


rail_gather_p = make_primitive(
    "jax_ep_rail_gather", cuda=synchronous_cuda_call("jax_ep_rail_gather", _attributes)
)


@rail_gather_p.def_abstract_eval
def _rail_gather_types(_: Any, *operands: Any, geometry: Geometry, **__: Any) -> Any:
    return [_of_all_nodes(geometry, x) for x in operands]


rail_sum_p = make_primitive(
    "jax_ep_rail_sum", cuda=synchronous_cuda_call("jax_ep_rail_sum", _attributes)
)


@rail_sum_p.def_abstract_eval
def _rail_sum_types(
    _: Any, node_ids: Any, node_sums: Any, *__: Any, geometry: Geometry, **___: Any
) -> Any:
    return [_of_own_tokens(geometry, node_sums)]


rail_dispatch_p = make_primitive(
    "jax_ep_rail_dispatch", cuda=synchronous_cuda_call("jax_ep_rail_dispatch", dispatch_attributes)
)


@rail_dispatch_p.def_abstract_eval
def _rail_dispatch_types(
    coordinate: Any, tokens: Any, *operands: Any, geometry: Geometry, **params: Any
) -> Any:
    """Those of a dispatch, then memory for the tokens of all nodes and for a word of each tile."""
    types = dispatch_types(coordinate, tokens, *operands, geometry=geometry, **params)
    all_tokens = _of_all_nodes(geometry, tokens)
    return [*types, all_tokens, like(tokens, all_tokens.shape[:1], jnp.uint32)]


rail_combine_p = make_primitive(
    "jax_ep_rail_combine", cuda=synchronous_cuda_call("jax_ep_rail_combine", combine_attributes)
)


@rail_combine_p.def_abstract_eval
def _rail_combine_types(
    coordinate: Any, expert_out: Any, group_ids: Any, *_: Any, geometry: Geometry, **params: Any
) -> Any:
    sums, *scalars = combine_types(coordinate, expert_out, group_ids, geometry=geometry, **params)
    return [_of_own_tokens(geometry, sums), *scalars]


def _of_all_nodes(geometry: Geometry, x: Any) -> Any:
    """The type of what all nodes have, given that of what this rank has."""
    return like(x, (x.shape[0] * geometry.routed.n_source_nodes, *x.shape[1:]), x.dtype)


def _of_own_tokens(geometry: Geometry, x: Any) -> Any:
    """The inverse."""
    return like(x, (x.shape[0] // geometry.routed.n_source_nodes, *x.shape[1:]), x.dtype)
