"""Rails over NVSHMEM: kernels that put rows into other nodes' memory and signal."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_ep.exchange.async_calls import InFlightCombine, InFlightDispatch
from jax_ep.exchange.calls import (
    bind_combine,
    combine_call,
    combine_grad_call,
    coordinate,
    dispatch_call,
    present,
)
from jax_ep.exchange.operands import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.exchange.overlap import CotangentSlots
from jax_ep.exchange.rules import call_in_backward
from jax_ep.nodes.nvshmem import calls
from jax_ep.nodes.rails import OverlappingRails


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
        return self._bind(calls.rail_p, mask, rows, **flags)[0]

    def _bind(self, primitive: Primitive, *operands: jax.Array | None, **flags: bool) -> Any:
        geometry = self.inner.geometry
        return primitive.bind(coordinate(geometry), *present(*operands), geometry=geometry, **flags)

    def gather(
        self, group_ids: jax.Array, weights: jax.Array | None, tokens: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """One kernel."""
        flags = dict(has_weights=weights is not None, has_tokens=tokens is not None)
        node_ids, *rest = self._bind(calls.rail_gather_p, group_ids, weights, tokens, **flags)
        all_weights = None if weights is None else rest.pop(0)
        return node_ids, all_weights, None if tokens is None else rest.pop(0)

    def reduce_scatter(
        self, node_sums: jax.Array, residual: jax.Array | None, node_ids: jax.Array
    ) -> jax.Array:
        """One kernel."""
        operands = node_ids, node_sums, residual
        return self._bind(calls.rail_sum_p, *operands, has_residual=residual is not None)[0]

    def dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> DispatchResults:
        """One custom call, of two kernels."""
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        arrays, params = dispatch_call(self.inner.geometry, operands, handle_shape)
        results = calls.rail_dispatch_p.bind(*arrays, group_ids, **params)[:-2]
        return DispatchResults.of(results, params["has_weights"])

    def combine(self, operands: CombineOperands) -> jax.Array:
        """One custom call, of two kernels."""
        return bind_combine(self.inner.geometry, operands, calls.rail_combine_p)[0]

    def start_dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> InFlightDispatch:
        """One custom call, of two kernels."""
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        start_p = calls.rail_dispatch_start_p
        geometry = self.inner.geometry
        return InFlightDispatch.start(geometry, operands, handle_shape, start_p, group_ids)

    def start_combine(self, operands: CombineOperands) -> InFlightCombine:
        """One custom call, of two kernels."""
        start_p = calls.rail_combine_start_p
        return InFlightCombine.start(self.inner.geometry, operands, start_p)

    def dispatch_grads(
        self, operands: CombineOperands, slots: CotangentSlots | None
    ) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
        """One custom call, of two kernels."""
        call = combine_call(self.inner.geometry, operands)
        both = calls.rail_combine_p, calls.rail_dispatch_grad_start_p
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
        both = calls.rail_combine_grad_p, calls.rail_combine_grad_start_p
        grads, slots = call_in_backward(slots, *both, [*arrays, group_ids], params)
        return grads[: 1 if operands.weights is None else 2], slots  # without scratch memory


def _flat(rows: jax.Array, n_leading: int) -> jax.Array:
    """`[n, W]`; the leading dimensions count rows."""
    return rows.reshape(math.prod(rows.shape[:n_leading]), -1)
