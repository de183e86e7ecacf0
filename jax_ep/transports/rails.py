"""Rails: how the ranks of one index, one on each node, exchange arrays.

N nodes of P ranks: rank `n * P + g` is rank g of node n, and belongs to rail g. Arrays of all nodes
are ordered by node. `XlaRails` are XLA's collectives; see nvshmem.py for others.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.geometry import Geometry


class Rails(abc.ABC):
    """The rails of a group. Immutable and hashable: a static parameter of traced calls.

    Neither function has a derivative; between_nodes.py defines those of what is made of them.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @abc.abstractmethod
    def spread(
        self, rows: jax.Array, is_sent: jax.Array | None, extras: jax.Array | None = None
    ) -> list[jax.Array]:
        """Gives this rank's rows to every node of its rail.

        Args:
            rows: `[T, ...]`.
            is_sent: `bool[N, T]`, or with more dimensions of the rows: the nodes that need a row.
                None: all do.
            extras: `[T, ...]`, for all nodes, or None.

        Returns:
            `[N * T, ...]`, the rows of all nodes, undefined where this node needs none; then, if
            there are any, the extras of all nodes.
        """

    @abc.abstractmethod
    def collect(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """Gives each node of its rail the part of this rank's rows that is for it.

        Args:
            rows: `[N * T, ...]`, T rows for each node; zero where `is_sent` is false.
            is_sent: `bool[N * T]`, or with more dimensions of the rows: the rows that are not zero.
                None: any may be.

        Returns:
            `[N, T, ...]`, by the node that they come from.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.geometry == getattr(other, "geometry", None)

    def __hash__(self) -> int:
        return hash((type(self), self.geometry))


class XlaRails(Rails):
    """XLA's collectives, which send all rows.

    Arrays travel as integers, because XLA:CPU converts bfloat16 to float32 and back, which changes
    NaNs.
    """

    def spread(
        self, rows: jax.Array, is_sent: jax.Array | None, extras: jax.Array | None = None
    ) -> list[jax.Array]:
        """One collective each."""
        return [self._spread(x) for x in (rows, extras) if x is not None]

    def collect(self, rows: jax.Array, is_sent: jax.Array | None) -> jax.Array:
        """One collective."""
        parts = as_integers(rows).reshape(self.geometry.routed.n_nodes, -1, *rows.shape[1:])
        return lax.bitcast_convert_type(self._all_to_all(parts), rows.dtype)

    def _spread(self, x: jax.Array) -> jax.Array:
        axis_name = self.geometry.axis_name
        integers = lax.all_gather(as_integers(x), axis_name, axis_index_groups=self._groups())
        return lax.bitcast_convert_type(integers, x.dtype).reshape(-1, *x.shape[1:])

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


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of `x`."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
