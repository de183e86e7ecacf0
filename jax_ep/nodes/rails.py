"""Rails: how the ranks of one index, one on each node, exchange arrays.

N nodes of P ranks: rank `n * P + g` is rank g of node n, and belongs to rail g. Arrays of all nodes
are ordered by node. `XlaRails` are XLA's collectives; nvshmem/ has others.
"""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.async_calls import InFlightCombine, InFlightDispatch
from jax_ep.exchange.numbers import in_float32
from jax_ep.exchange.operands import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.exchange.overlap import CotangentSlots
from jax_ep.exchange.rules import CustomCalls
from jax_ep.formats.bits import as_integers
from jax_ep.geometry import Geometry
from jax_ep.nodes.routing import needs, route_within


class Rails(abc.ABC):
    """The rails of a group. Immutable and hashable: a static parameter of traced calls.

    No function has a derivative; rules.py and overlapped.py define those of what is made of them.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @abc.abstractmethod
    def all_gather(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """Gives this rank's rows to every node of its rail.

        Args:
            rows: `[T, ...]`.
            is_sent: `bool[N, T]`, or with more dimensions of the rows: the nodes that need a row.
                None: all do.

        Returns:
            `[N * T, ...]`, the rows of all nodes, undefined where this node needs none.
        """

    @abc.abstractmethod
    def all_to_all(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """Gives each node of its rail the part of this rank's rows that is for it.

        Args:
            rows: `[N * T, ...]`, T rows for each node; zero where `is_sent` is false.
            is_sent: `bool[N * T]`, or with more dimensions of the rows: the rows that are not zero.
                None: any may be.

        Returns:
            `[N, T, ...]`, by the node that they come from.
        """

    def gather(
        self, group_ids: jax.Array, weights: jax.Array | None, tokens: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """The operands of an intra-node dispatch, from all nodes.

        Args:
            group_ids: `int32[T, N_c]` of this rank's tokens.
            weights: `float32[T, N_c]` or None.
            tokens: `[T, H]` or None.

        Returns:
            The ids of `route_within`, `int32[N * T, N_c]`; `float32[N * T, N_c]` if there are
            weights; and `[N * T, H]` if there are tokens, undefined where this node needs none.
        """
        n_choices, choices = group_ids.shape[1], group_ids
        if weights is not None:  # as one array of integers
            bits = lax.bitcast_convert_type(weights, jnp.int32)
            choices = jnp.concatenate([group_ids, bits], axis=1)
        all_choices = self.all_gather(choices, None)
        node_ids = route_within(self.geometry, all_choices[:, :n_choices])
        all_weights = None
        if weights is not None:
            all_weights = lax.bitcast_convert_type(all_choices[:, n_choices:], jnp.float32)
        if tokens is None:
            return node_ids, all_weights, None
        return node_ids, all_weights, self.all_gather(tokens, needs(self.geometry, group_ids))

    def reduce_scatter(
        self, node_sums: jax.Array, residual: jax.Array | None, node_ids: jax.Array
    ) -> jax.Array:
        """The nodes' sums of this rank's tokens, in node order, then the residual; rounded once.

        Args:
            node_sums: `[N * T, H]`, this node's sums for all nodes' tokens; zero for those without
                choices here.
            residual: `[T, H]` or None.
            node_ids: `int32[N * T, N_c]` of `route_within`.

        Returns:
            `[T, H]` in the dtype of the sums.
        """
        parts = self.all_to_all(node_sums, (node_ids >= 0).any(axis=1))
        total = parts[0].astype(jnp.float32)
        for part in parts[1:]:
            total = total + part.astype(jnp.float32)
        # XLA drops "0 +". A sum that starts at +0 is never -0.
        total = total + jnp.where(total == 0, -total, jnp.zeros_like(total))
        if residual is not None:
            total = total + in_float32(residual)
        return total.astype(node_sums.dtype)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.geometry == getattr(other, "geometry", None)

    def __hash__(self) -> int:
        return hash((type(self), self.geometry))


class OverlappingRails(Rails):
    """Rails whose exchange runs beside the intra-node call, as one operation."""

    def __init__(self, geometry: Geometry, inner: CustomCalls) -> None:
        """`inner`: the intra-node calls."""
        super().__init__(geometry)
        self.inner = inner

    @abc.abstractmethod
    def dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> DispatchResults:
        """Sends this rank's tokens to the nodes that need them, and dispatches all in this node.

        Args:
            operands: of the intra-node dispatch, but with the tokens of this rank, `[T, H]`.
            group_ids: `int32[T, N_c]`, this rank's choices, which say what nodes need a token.
        """

    @abc.abstractmethod
    def combine(self, operands: CombineOperands) -> jax.Array:
        """Combines inside this node, and adds the sums of all nodes: `[T, H]`.

        Args:
            operands: of the intra-node combine, but with the residual of this rank, `[T, H]`.
        """

    @abc.abstractmethod
    def start_dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> InFlightDispatch:
        """Starts what `dispatch` does."""

    @abc.abstractmethod
    def start_combine(self, operands: CombineOperands) -> InFlightCombine:
        """Starts what `combine` does."""

    @abc.abstractmethod
    def dispatch_grads(
        self, operands: CombineOperands, slots: CotangentSlots | None
    ) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
        """The backward of dispatch: a combine, and the cotangents of `slots`.

        The second gradient, if there are `row_scalars`, is `float32[N * T, N_c]`: those that the
        choices of all nodes' tokens have in this node. With slots, see `call_in_backward`.
        """

    @abc.abstractmethod
    def combine_grads(
        self,
        operands: CombineOperands,
        cotangent: jax.Array,
        group_ids: jax.Array,
        slots: CotangentSlots | None,
    ) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
        """Sends this rank's cotangents to the nodes that need them, and all inside this node.

        Returns the gradients of `expert_out` and of weights, as the backward of the intra-node
        combine does, and the cotangents of `slots`.

        Args:
            operands: of the intra-node combine.
            cotangent: of `combine`'s sums, `[T, H]`.
            group_ids: `int32[T, N_c]`, this rank's choices, which say what nodes need a cotangent.
            slots: see `call_in_backward`.
        """


class XlaRails(Rails):
    """XLA's collectives, which send all rows.

    Arrays travel as integers, because XLA:CPU converts bfloat16 to float32 and back, which changes
    NaNs.
    """

    def all_gather(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """One collective."""
        axis_name = self.geometry.axis_name
        integers = lax.all_gather(as_integers(rows), axis_name, axis_index_groups=self._groups())
        return lax.bitcast_convert_type(integers, rows.dtype).reshape(-1, *rows.shape[1:])

    def all_to_all(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """One collective."""
        parts = as_integers(rows).reshape(self.geometry.routed.n_nodes, -1, *rows.shape[1:])
        return lax.bitcast_convert_type(self._all_to_all(parts), rows.dtype)

    def _groups(self) -> list[list[int]]:
        """The ranks of each rail, by node."""
        routed = self.geometry.routed
        per_node, n_nodes = routed.n_ranks_per_node, routed.n_nodes
        return [[n * per_node + g for n in range(n_nodes)] for g in range(per_node)]

    def _all_to_all(self, parts: jax.Array) -> jax.Array:
        """`[N, ...]` by destination to `[N, ...]` by source.

        JAX cannot map `lax.all_to_all` with groups of ranks, so mapped axes become the last ones.
        """
        groups, axis_name = self._groups(), self.geometry.axis_name

        @jax.custom_batching.custom_vmap
        def exchange(parts: jax.Array) -> jax.Array:
            return lax.all_to_all(parts, axis_name, 0, 0, axis_index_groups=groups)

        @exchange.def_vmap
        def exchange_mapped(_: int, __: Any, parts: jax.Array) -> tuple[jax.Array, bool]:
            return jnp.moveaxis(exchange(jnp.moveaxis(parts, 0, -1)), -1, 0), True

        return exchange(parts)
