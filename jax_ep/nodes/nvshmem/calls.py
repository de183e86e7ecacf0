"""The primitives behind `nvshmem`: exchanges of rows between the ranks of a rail.

Their geometry is that within nodes; nvshmem.py binds them.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep.exchange import calls as primitives
from jax_ep.exchange.async_primitives import make_combine_start, make_start
from jax_ep.ffi.lowering import call_primitive, like
from jax_ep.geometry import Geometry


def _attributes(geometry: Geometry, **flags: bool) -> dict[str, Any]:
    """The attributes that a handler reads."""
    return dict(group=geometry.key, **{name: np.bool_(flag) for name, flag in flags.items()})


def _rail_types(*operands: Any, geometry: Geometry, by_node: bool, **_: Any) -> list[Any]:
    rows = operands[-1]
    return [rows if by_node else _of_all_nodes(geometry, rows)]


def _rail_gather_types(_: Any, *operands: Any, geometry: Geometry, **__: Any) -> list[Any]:
    return [_of_all_nodes(geometry, x) for x in operands]


def _rail_sum_types(
    _: Any, node_ids: Any, node_sums: Any, *__: Any, geometry: Geometry, **___: Any
) -> list[Any]:
    return [_of_own_tokens(geometry, node_sums)]


def _rail_dispatch_types(*operands: Any, **params: Any) -> list[Any]:
    """Types of a dispatch, then of scratch memory."""
    return [*primitives.dispatch_types(*operands, **params), *_arriving_types(*operands, **params)]


def _rail_combine_types(*operands: Any, geometry: Geometry, **params: Any) -> list[Any]:
    sums, *scalars = primitives.combine_types(*operands, geometry=geometry, **params)
    return [_of_own_tokens(geometry, sums), *scalars]


def _grad_types(*operands: Any, **params: Any) -> list[Any]:
    """Types of the gradients; the last operand are choices."""
    return primitives.combine_grad_types(*operands[:-1], **params)


def _rail_combine_grad_types(*operands: Any, **params: Any) -> list[Any]:
    """Types of the gradients, then of scratch memory."""
    return [*_grad_types(*operands, **params), *_arriving_types(*operands, **params)]


def _arriving_types(_: Any, rows: Any, *__: Any, geometry: Geometry, **___: Any) -> list[Any]:
    """Types of memory for all nodes' tokens, or cotangents, and for a word of each tile."""
    all_rows = _of_all_nodes(geometry, rows)
    return [all_rows, like(rows, all_rows.shape[:1], jnp.uint32)]


def _of_all_nodes(geometry: Geometry, x: Any) -> Any:
    """The type of what all nodes have, given that of what this rank has."""
    return like(x, (x.shape[0] * geometry.routed.n_source_nodes, *x.shape[1:]), x.dtype)


def _of_own_tokens(geometry: Geometry, x: Any) -> Any:
    """The inverse."""
    return like(x, (x.shape[0] // geometry.routed.n_source_nodes, *x.shape[1:]), x.dtype)


_on_gpus = functools.partial(call_primitive, on_cpu=False)
rail_p = _on_gpus("jax_ep_rail", _attributes, _rail_types)
rail_gather_p = _on_gpus("jax_ep_rail_gather", _attributes, _rail_gather_types)
rail_sum_p = _on_gpus("jax_ep_rail_sum", _attributes, _rail_sum_types)
rail_dispatch_p = _on_gpus(
    "jax_ep_rail_dispatch", primitives.dispatch_attributes, _rail_dispatch_types
)
rail_combine_p = _on_gpus("jax_ep_rail_combine", primitives.combine_attributes, _rail_combine_types)
rail_combine_grad_p = _on_gpus(
    "jax_ep_rail_combine_grad", primitives.combine_attributes, _rail_combine_grad_types
)
# The same, asynchronous. The backward of dispatch is a combine that may have `row_scalars`.
rail_dispatch_start_p = make_start(
    "jax_ep_rail_dispatch_start",
    primitives.dispatch_attributes,
    primitives.dispatch_types,
    _arriving_types,
)
rail_combine_start_p = make_combine_start("jax_ep_rail_combine_start", _rail_combine_types)
rail_dispatch_grad_start_p = make_start(
    "jax_ep_rail_dispatch_grad_start", primitives.combine_attributes, _rail_combine_types
)
rail_combine_grad_start_p = make_start(
    "jax_ep_rail_combine_grad_start", primitives.combine_attributes, _grad_types, _arriving_types
)
