"""Rails over NVSHMEM: kernels that put rows into other nodes' memory and signal.

The geometry of their primitives is that within nodes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_ep.exchange.async_calls import InFlightCombine, InFlightDispatch
from jax_ep.exchange.async_primitives import make_combine_start, make_start
from jax_ep.exchange.calls import (
    bind_combine,
    combine_attributes,
    combine_call,
    combine_grad_call,
    combine_grad_types,
    combine_types,
    coordinate,
    dispatch_attributes,
    dispatch_call,
    dispatch_types,
    present,
)
from jax_ep.exchange.operands import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.exchange.overlap import CotangentSlots
from jax_ep.exchange.rules import call_in_backward
from jax_ep.ffi.lowering import call_primitive, like
from jax_ep.geometry import Geometry
from jax_ep.nodes.rails import OverlappingRails


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
    return [*dispatch_types(*operands, **params), *_arriving_types(*operands, **params)]


def _rail_combine_types(*operands: Any, geometry: Geometry, **params: Any) -> list[Any]:
    sums, *scalars = combine_types(*operands, geometry=geometry, **params)
    return [_of_own_tokens(geometry, sums), *scalars]


def _grad_types(*operands: Any, **params: Any) -> list[Any]:
    """Types of the gradients; the last operand are choices."""
    return combine_grad_types(*operands[:-1], **params)


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
    """The type of what this rank has, given that of what all nodes have."""
    return like(x, (x.shape[0] // geometry.routed.n_source_nodes, *x.shape[1:]), x.dtype)


_on_gpus = functools.partial(call_primitive, on_cpu=False)
rail_p = _on_gpus("jax_ep_rail", _attributes, _rail_types)
rail_gather_p = _on_gpus("jax_ep_rail_gather", _attributes, _rail_gather_types)
rail_sum_p = _on_gpus("jax_ep_rail_sum", _attributes, _rail_sum_types)
rail_dispatch_p = _on_gpus("jax_ep_rail_dispatch", dispatch_attributes, _rail_dispatch_types)
rail_combine_p = _on_gpus("jax_ep_rail_combine", combine_attributes, _rail_combine_types)
rail_combine_grad_p = _on_gpus(
    "jax_ep_rail_combine_grad", combine_attributes, _rail_combine_grad_types
)
# Asynchronous. The backward of dispatch is a combine that may have `row_scalars`.
rail_dispatch_start_p = make_start(
    "jax_ep_rail_dispatch_start", dispatch_attributes, dispatch_types, _arriving_types
)
rail_combine_start_p = make_combine_start("jax_ep_rail_combine_start", _rail_combine_types)
rail_dispatch_grad_start_p = make_start(
    "jax_ep_rail_dispatch_grad_start", combine_attributes, _rail_combine_types
)
rail_combine_grad_start_p = make_start(
    "jax_ep_rail_combine_grad_start", combine_attributes, _grad_types, _arriving_types
)


class NvshmemRails(OverlappingRails):
    """NVSHMEM's puts and signals, from kernels. Rows that no one needs do not travel."""

    def all_gather(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """One kernel."""
        flat = rows if is_sent is None else _flat(rows, is_sent.ndim - 1)
        return self._send(flat, is_sent, by_node=False).reshape(-1, *rows.shape[1:])

    def all_to_all(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """One kernel."""
        flat = _flat(rows, 1 if is_sent is None else is_sent.ndim)
        parts = self._send(flat, is_sent, by_node=True)
        return parts.reshape(self.geometry.routed.n_nodes, -1, *rows.shape[1:])

    def _send(self, rows: jax.Array, is_sent: jax.Array | None, by_node: bool) -> jax.Array:
        """`[N * n, W]`, rows of all nodes by the node that they come from.

        Sends `[n, W]` to every node; or `by_node`, `[N * n, W]`, n for each. `is_sent` has N * n
        elements; None: all are sent. Those for this node always are; rows that were not sent are
        undefined, or zero if `by_node`. A row takes a multiple of 4 bytes.
        """
        mask = None if is_sent is None else is_sent.reshape(-1).astype(jnp.uint8)
        flags = dict(has_mask=mask is not None, by_node=by_node)
        return self._bind(rail_p, mask, rows, **flags)[0]

    def _bind(self, primitive: Primitive, *operands: jax.Array | None, **flags: bool) -> Any:
        geometry = self.inner.geometry
        return primitive.bind(coordinate(geometry), *present(*operands), geometry=geometry, **flags)

    def gather(
        self, group_ids: jax.Array, weights: jax.Array | None, tokens: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """One kernel."""
        flags = dict(has_weights=weights is not None, has_tokens=tokens is not None)
        node_ids, *rest = self._bind(rail_gather_p, group_ids, weights, tokens, **flags)
        all_weights = None if weights is None else rest.pop(0)
        return node_ids, all_weights, None if tokens is None else rest.pop(0)

    def reduce_scatter(
        self, node_sums: jax.Array, residual: jax.Array | None, node_ids: jax.Array
    ) -> jax.Array:
        """One kernel."""
        operands = node_ids, node_sums, residual
        return self._bind(rail_sum_p, *operands, has_residual=residual is not None)[0]

    def dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> DispatchResults:
        """One custom call, of two kernels."""
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        arrays, params = dispatch_call(self.inner.geometry, operands, handle_shape)
        results = rail_dispatch_p.bind(*arrays, group_ids, **params)[:-2]
        return DispatchResults.of(results, params["has_weights"])

    def combine(self, operands: CombineOperands) -> jax.Array:
        """One custom call, of two kernels."""
        return bind_combine(self.inner.geometry, operands, rail_combine_p)[0]

    def start_dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> InFlightDispatch:
        """One custom call, of two kernels."""
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        start_p = rail_dispatch_start_p
        geometry = self.inner.geometry
        return InFlightDispatch.start(geometry, operands, handle_shape, start_p, group_ids)

    def start_combine(self, operands: CombineOperands) -> InFlightCombine:
        """One custom call, of two kernels."""
        start_p = rail_combine_start_p
        return InFlightCombine.start(self.inner.geometry, operands, start_p)

    def dispatch_grads(
        self, operands: CombineOperands, slots: CotangentSlots | None
    ) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
        """One custom call, of two kernels."""
        call = combine_call(self.inner.geometry, operands)
        both = rail_combine_p, rail_dispatch_grad_start_p
        return call_in_backward(slots, *both, *call)

    def combine_grads(
        self,
        operands: CombineOperands,
        cotangent: jax.Array,
        group_ids: jax.Array,
        slots: CotangentSlots | None,
    ) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
        """One custom call, of two kernels."""
        arrays, params = combine_grad_call(self.inner.geometry, operands, cotangent)
        both = rail_combine_grad_p, rail_combine_grad_start_p
        grads, slots = call_in_backward(slots, *both, [*arrays, group_ids], params)
        return grads[: 1 if operands.weights is None else 2], slots  # without scratch memory


def _flat(rows: jax.Array, n_leading: int) -> jax.Array:
    """`[n, W]`; the leading dimensions count rows."""
    return rows.reshape(math.prod(rows.shape[:n_leading]), -1)
