"""Transport `nvshmem`: `p2p` inside each node, NVSHMEM between the nodes."""

import time
import warnings

import jax

from jax_ep.exchange.rules import CustomCalls
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.nodes import codes
from jax_ep.nodes.connection import P2pByNodes
from jax_ep.nodes.nvshmem import bootstrap as nvshmem_bootstrap
from jax_ep.nodes.nvshmem import rail_room
from jax_ep.nodes.nvshmem.rails import NvshmemRails
from jax_ep.nodes.rails import Rails
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import bootstrap

# How long close() waits for a peer, which may be dead, after `p2p` has waited for it; then for the
# network; and then for the peers' networks.
_MAX_CLOSE_S = 2.0


class NvshmemByNodes(P2pByNodes):
    """`p2p` inside nodes, NVSHMEM between them."""

    name = "nvshmem"

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._exchange: Exchange | None = None

    def make_rails(self, geometry: Geometry, inner: CustomCalls) -> Rails:
        """Kernels that put and signal."""
        return NvshmemRails(geometry, inner)

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
        super().open(exchange)
        try:
            self._open_rail(exchange)
        except BaseException as error:
            exchange.give_up(error)  # before the wait for the others
            super().close()
            raise

    def _open_rail(self, exchange: Exchange) -> None:
        nvshmem, key = nvshmem_bootstrap.load(), self.geometry.memory_key
        if nvshmem.share(key):
            return
        geometry = self.calls.geometry
        (local,) = geometry.local_coordinates
        nvshmem_bootstrap.join(nvshmem, exchange, bootstrap.ordinal(local))
        heap = nvshmem_bootstrap.find_heap(nvshmem, exchange, key, self.memory_of_rail())
        n_ranks = geometry.routed.n_ranks_per_node
        peers = geometry.routed_replicas[local.replica][local.rank % n_ranks :: n_ranks]

        def set_up() -> bytes:
            nvshmem.open(
                key=key,
                heap=heap,
                node=local.rank // n_ranks,
                pes=[each.device.process_index for each in peers],
                message_bytes=_message_bytes(geometry),
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
        key = self.geometry.memory_key
        (local,) = self.geometry.local_coordinates
        is_captured = extension.load_cuda().is_captured(key, bootstrap.ordinal(local))
        nvshmem = nvshmem_bootstrap.load()
        try:
            super().close()
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
            f"Group {self.calls.geometry.key} is closed, but the "
            f"{self.memory_of_rail() / 2**20:.0f} MiB that other nodes write to "
            f"stay unused: {reason}{advice if is_captured else ''}",
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
        """`EPGroup.memory`."""
        return super().memory() + self.memory_of_rail()

    def memory_of_rail(self) -> int:
        """Bytes of this rank's heap, which the network reaches."""
        geometry = self.calls.geometry
        owner = geometry.memory_of or geometry
        return nvshmem_bootstrap.load().heap_bytes(owner.routed.n_nodes, _message_bytes(owner))


def _message_bytes(geometry: Geometry) -> int:
    """Of the longest inter-node row, and the ids and weights that go with it."""
    config = geometry.config
    token_bytes = codes.max_token_bytes(config.token_format, config.hidden_size)
    row_bytes = max(bootstrap.max_message_bytes(config), token_bytes)
    return row_bytes + 8 * geometry.routed.n_choices
