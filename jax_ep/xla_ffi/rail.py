"""The primitives behind `nvshmem`: exchanges of rows between the ranks of a rail."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.geometry import Geometry
from jax_ep.operands import CombineOperands, DispatchOperands, DispatchResults
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
    geometry: Geometry,
    rows: jax.Array,
    *,
    n_nodes: int,
    by_node: bool,
    fills: bool = False,
    is_sent: jax.Array | None = None,
    extras: jax.Array | None = None,
) -> list[jax.Array]:
    """Sends rows to all nodes of the rail.

    Args:
        geometry: within nodes.
        rows: `[n, W]`, for every node; or `[N * n, W]`, n for each. A row takes a multiple of 4
            bytes.
        n_nodes: N.
        by_node: whether `rows` has a part for each node.
        fills: whether rows that were not sent are zero in the result. Otherwise they are undefined.
        is_sent: `bool[N * n]`, whether to send a row to a node; None: all are sent. Those for this
            node always are.
        extras: `[n, W2]`, always sent to every node; or None.

    Returns:
        `[N * n, W]`, by the node that they come from; then the same of the extras, if there are
        any.
    """
    mask = None if is_sent is None else is_sent.astype(jnp.uint8)
    return rail_p.bind(
        coordinate(geometry),
        *present(mask, rows, extras),
        geometry=geometry,
        n_nodes=n_nodes,
        has_mask=mask is not None,
        has_extras=extras is not None,
        by_node=by_node,
        fills=fills,
    )


def bind_rail_dispatch(
    geometry: Geometry,
    operands: DispatchOperands,
    is_sent: jax.Array,
    handle_shape: tuple[int, ...],
) -> DispatchResults:
    """Sends tokens to all nodes of the rail, and dispatches those of all nodes inside this one.

    Args:
        geometry: within nodes.
        operands: of the dispatch inside the node, but with the tokens of this rank, `[T, W]`.
        is_sent: `bool[N, T]`, whether to send a token to a node.
        handle_shape: of the dispatch inside the node.
    """
    arrays, params = dispatch_call(geometry, operands, handle_shape)
    mask = is_sent.reshape(-1).astype(jnp.uint8)
    results = rail_dispatch_p.bind(*arrays, mask, **params)[:-2]
    return DispatchResults.of(results, params["has_weights"])


def bind_rail_combine(
    geometry: Geometry, operands: CombineOperands, is_sent: jax.Array, n_nodes: int
) -> list[jax.Array]:
    """Combines inside the node, and adds the sums of all nodes: `[T, H]`.

    The second result, if there are `row_scalars`, is `float32[N * T, N_c]`: those that the choices
    of all nodes' tokens have on this node.

    Args:
        geometry: within nodes.
        operands: of the combine inside the node, which is a sum; but with the residual of this
            rank, `[T, H]`.
        is_sent: `bool[N * T]`, the tokens of all nodes that have rows on this one.
        n_nodes: N.
    """
    arrays, params = combine_call(geometry, operands)
    return rail_combine_p.bind(*arrays, is_sent.astype(jnp.uint8), **params, n_nodes=n_nodes)


def _attributes(geometry: Geometry, n_nodes: int, **flags: bool) -> dict[str, Any]:
    """The attributes that the handler reads."""
    return dict(group=geometry.key, **{name: np.bool_(flag) for name, flag in flags.items()})


rail_p = make_primitive("jax_ep_rail", cuda=synchronous_cuda_call("jax_ep_rail", _attributes))


@rail_p.def_abstract_eval
def _rail_types(*operands: Any, n_nodes: int, by_node: bool, has_extras: bool, **_: Any) -> Any:
    rows, *extras = operands[-2:] if has_extras else operands[-1:]
    n_rows = rows.shape[0] if by_node else rows.shape[0] * n_nodes
    return [like(rows, (n_rows, *x.shape[1:]), x.dtype) for x in (rows, *extras)]


rail_dispatch_p = make_primitive(
    "jax_ep_rail_dispatch", cuda=synchronous_cuda_call("jax_ep_rail_dispatch", dispatch_attributes)
)


@rail_dispatch_p.def_abstract_eval
def _rail_dispatch_types(coordinate: Any, tokens: Any, *operands: Any, **params: Any) -> Any:
    """Those of a dispatch, then memory for the tokens of all nodes and for a word of each tile."""
    *_, mask = operands
    n_all = mask.shape[0]
    types = dispatch_types(coordinate, tokens, *operands, **params)
    all_tokens = like(tokens, (n_all, tokens.shape[1]), tokens.dtype)
    return [*types, all_tokens, like(tokens, (n_all,), jnp.uint32)]


rail_combine_p = make_primitive(
    "jax_ep_rail_combine", cuda=synchronous_cuda_call("jax_ep_rail_combine", combine_attributes)
)


@rail_combine_p.def_abstract_eval
def _rail_combine_types(
    coordinate: Any, expert_out: Any, group_ids: Any, *_: Any, n_nodes: int, **params: Any
) -> Any:
    sums, *scalars = combine_types(coordinate, expert_out, group_ids, **params)
    n_all, size = sums.shape
    return [like(sums, (n_all // n_nodes, size), sums.dtype), *scalars]
