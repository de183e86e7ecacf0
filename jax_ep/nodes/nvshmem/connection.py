"""Transport `nvshmem`: `p2p` inside each node, NVSHMEM between the nodes."""

import math
import time
import warnings
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
from jax_ep.exchange.overlap import CotangentSlots, call_in_backward
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.nodes import calls as primitives
from jax_ep.nodes import codes
from jax_ep.nodes.connection import P2pByNodes
from jax_ep.nodes.nvshmem import bootstrap as nvshmem_bootstrap
from jax_ep.nodes.nvshmem import rail_room
from jax_ep.nodes.rails import OverlappingRails, Rails
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import bootstrap

# How long close() waits for a peer, which may be dead, after `p2p` has waited for it; then for the
# network; and then for the peers' networks.
_MAX_CLOSE_S = 2.0


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
        return self._bind(primitives.rail_p, mask, rows, **flags)[0]

    def _bind(self, primitive: Primitive, *operands: jax.Array | None, **flags: bool) -> Any:
        geometry = self.inner.geometry
        return primitive.bind(coordinate(geometry), *present(*operands), geometry=geometry, **flags)

    def gather(
        self, group_ids: jax.Array, weights: jax.Array | None, tokens: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """One kernel."""
        flags = dict(has_weights=weights is not None, has_tokens=tokens is not None)
        node_ids, *rest = self._bind(primitives.rail_gather_p, group_ids, weights, tokens, **flags)
        all_weights = None if weights is None else rest.pop(0)
        return node_ids, all_weights, None if tokens is None else rest.pop(0)

    def reduce_scatter(
        self, node_sums: jax.Array, residual: jax.Array | None, node_ids: jax.Array
    ) -> jax.Array:
        """One kernel."""
        operands = node_ids, node_sums, residual
        return self._bind(primitives.rail_sum_p, *operands, has_residual=residual is not None)[0]

    def dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> DispatchResults:
        """One custom call, of two kernels."""
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        arrays, params = dispatch_call(self.inner.geometry, operands, handle_shape)
        results = primitives.rail_dispatch_p.bind(*arrays, group_ids, **params)[:-2]
        return DispatchResults.of(results, params["has_weights"])

    def combine(self, operands: CombineOperands) -> jax.Array:
        """One custom call, of two kernels."""
        return bind_combine(self.inner.geometry, operands, primitives.rail_combine_p)[0]

    def start_dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> InFlightDispatch:
        """One custom call, of two kernels."""
        handle_shape = self.inner.handle_shape(operands.group_ids.shape[0])
        start_p = primitives.rail_dispatch_start_p
        geometry = self.inner.geometry
        return InFlightDispatch.start(geometry, operands, handle_shape, start_p, group_ids)

    def start_combine(self, operands: CombineOperands) -> InFlightCombine:
        """One custom call, of two kernels."""
        start_p = primitives.rail_combine_start_p
        return InFlightCombine.start(self.inner.geometry, operands, start_p)

    def dispatch_grads(
        self, operands: CombineOperands, slots: CotangentSlots | None
    ) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
        """One custom call, of two kernels."""
        call = combine_call(self.inner.geometry, operands)
        both = primitives.rail_combine_p, primitives.rail_dispatch_grad_start_p
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
        both = primitives.rail_combine_grad_p, primitives.rail_combine_grad_start_p
        grads, slots = call_in_backward(slots, *both, [*arrays, group_ids], params)
        return grads[: 1 if operands.weights is None else 2], slots  # without scratch memory


def _flat(rows: jax.Array, n_leading: int) -> jax.Array:
    """`[n, W]`; the leading dimensions count rows."""
    return rows.reshape(math.prod(rows.shape[:n_leading]), -1)


class NvshmemByNodes(P2pByNodes):
    """`p2p` inside nodes, NVSHMEM between them."""

    name = "nvshmem"

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._exchange: Exchange | None = None

    def make_rails(self) -> Rails:
        """Kernels that put and signal."""
        return NvshmemRails(self.geometry, self.inner)

    @classmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Requires what `p2p` does of each node, NVSHMEM, and all processes with one GPU each.

        And that the GPUs have room for the exchange's kernels.
        """
        reason = super().unsupported_reason(geometry, exchange)
        if reason is not None:
            return reason
        if exchange.processes != tuple(range(jax.process_count())):
            return "the mesh must have devices of all processes of the job."
        if (
            len({device.process_index for device in geometry.mesh.devices.flat})
            < geometry.mesh.size
        ):
            return "each process must have one device of the mesh."
        reason = exchange.agree("nvshmem", nvshmem_bootstrap.why_missing())
        if reason is not None:
            return reason
        (local,) = geometry.local_coordinates
        nvshmem = nvshmem_bootstrap.load()
        return rail_room.unsupported_reason(nvshmem, exchange, bootstrap.ordinal(local))

    def open(self, exchange: Exchange) -> None:
        """Opens `p2p` inside, then this rank's rail."""
        self._exchange = exchange
        self.inner.open(exchange)
        try:
            self._open_rail(exchange)
        except BaseException as error:
            exchange.give_up(error)  # before the wait for the others
            self.inner.abandon()
            raise

    def _open_rail(self, exchange: Exchange) -> None:
        nvshmem, key = nvshmem_bootstrap.load(), self.inner.geometry.memory_key
        if nvshmem.share(key):
            return
        (local,) = self.geometry.local_coordinates
        nvshmem_bootstrap.join(nvshmem, exchange, bootstrap.ordinal(local))
        heap = nvshmem_bootstrap.find_heap(nvshmem, exchange, key, self.memory_of_rail())
        n_ranks = self.geometry.routed.n_ranks_per_node
        peers = self.geometry.routed_replicas[local.replica][local.rank % n_ranks :: n_ranks]

        def set_up() -> bytes:
            nvshmem.open(
                key=key,
                heap=heap,
                node=local.rank // n_ranks,
                pes=[each.device.process_index for each in peers],
                message_bytes=_message_bytes(self.geometry),
                device=bootstrap.ordinal(local),
            )
            return b""

        try:
            exchange.gather("rail", set_up)  # nobody sends before all have cleared their words
        except BaseException:
            nvshmem.close(key)  # not released: a process that has seen no failure may write to it
            raise

    def close(self) -> None:
        """Closes `p2p` inside, then the rail.

        Its heap serves later groups if all processes have come to an end with it: no call of theirs
        writes to it any more, and the network has delivered what they have sent. Otherwise warns.
        """
        key = self.inner.geometry.memory_key
        (local,) = self.geometry.local_coordinates
        is_captured = extension.load_cuda().is_captured(key, bootstrap.ordinal(local))
        nvshmem = nvshmem_bootstrap.load()
        try:
            self.inner.close()
        finally:  # also after Ctrl-C: all processes have the rail of the next equal group, or none
            is_last = nvshmem.close(key)
        if not is_last:
            return
        reason = self._why_in_use(key)
        if reason is None:
            nvshmem.release(key, is_captured)
            return
        advice = (
            " Calls that XLA has captured may time out in an equal group: compile their programs "
            "again (jax.clear_caches())."
        )
        warnings.warn(
            f"Group {self.geometry.key} is closed, but the {self.memory_of_rail() / 2**20:.0f} MiB "
            f"that other nodes write to stay unused: {reason}{advice if is_captured else ''}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _why_in_use(self, key: str) -> str | None:
        """Waits until nothing arrives in the heap of the closed rail any more; else the reason.

        A process whose network is late takes the last step, too, so that the others need not wait.
        The heap that they release serves no group as long as this process has not released it.
        """
        assert self._exchange is not None
        late = None
        try:
            self._exchange.close("rail closed", _MAX_CLOSE_S)
            # Of both waits: others may wait for their networks when this process is done.
            end = time.monotonic() + 2 * _MAX_CLOSE_S
            late = nvshmem_bootstrap.drain(key, _MAX_CLOSE_S)
            self._exchange.close("rail drained", max(end - time.monotonic(), _MAX_CLOSE_S))
        except Exception as error:
            return late or f"another process may still write to them: {error}"
        return late

    def abandon(self) -> None:
        """Closes both; the rail's heap, too, only once all processes have."""
        self.close()

    def memory(self) -> int:
        """See `EPGroup.memory`."""
        return super().memory() + self.memory_of_rail()

    def memory_of_rail(self) -> int:
        """Bytes of this rank's heap, which the network reaches."""
        owner = self.geometry.memory_of or self.geometry
        return nvshmem_bootstrap.load().heap_bytes(owner.routed.n_nodes, _message_bytes(owner))


def _message_bytes(geometry: Geometry) -> int:
    """Of the longest inter-node row, and the ids and weights that go with it."""
    config = geometry.config
    token_bytes = codes.max_token_bytes(config.token_format, config.hidden_size)
    row_bytes = max(bootstrap.max_message_bytes(config), token_bytes)
    return row_bytes + 8 * geometry.routed.n_choices
