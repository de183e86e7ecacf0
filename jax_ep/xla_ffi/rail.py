"""The primitive behind `nvshmem`: an exchange of rows between the ranks of a rail."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_ep.geometry import Geometry
from jax_ep.xla_ffi.lowering import check_group, custom_call, fusion_barrier, like, make_primitive
from jax_ep.xla_ffi.primitives import coordinate, present


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
        rows: `[n, W]`, for every node; or `[N * n, W]`, n for each. 4 bytes or more per element.
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


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, geometry: Geometry, n_nodes: int, **flags: bool
) -> Any:
    """The group's check, then the custom call."""
    checked = check_group(ctx, operands[0], geometry)
    inner = ctx.replace(avals_in=[ctx.avals_in[0], *ctx.avals_in])
    attributes = {name: np.bool_(flag) for name, flag in flags.items()}
    call = custom_call("jax_ep_rail")(inner, *checked, *operands, group=geometry.key, **attributes)
    return fusion_barrier(call)


rail_p = make_primitive("jax_ep_rail", cuda=_lower)


@rail_p.def_abstract_eval
def _rail_types(*operands: Any, n_nodes: int, by_node: bool, has_extras: bool, **_: Any) -> Any:
    rows, *extras = operands[-2:] if has_extras else operands[-1:]
    n_rows = rows.shape[0] if by_node else rows.shape[0] * n_nodes
    return [like(rows, (n_rows, *x.shape[1:]), x.dtype) for x in (rows, *extras)]
