"""Transport `nvshmem`: `p2p` inside each node, NVSHMEM between the nodes."""

import collections
import dataclasses
import json
import time
import warnings
from collections.abc import Mapping
from types import ModuleType

import jax

from jax_ep.exchange.rules import CustomCalls
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.nodes import codes
from jax_ep.nodes.connection import P2pByNodes
from jax_ep.nodes.nvshmem import bootstrap as nvshmem_bootstrap
from jax_ep.nodes.nvshmem.rails import NvshmemRails
from jax_ep.nodes.rails import Rails
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.messages import has_types, sent_json
from jax_ep.transports import workspaces

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
        return room_problem(nvshmem, exchange, workspaces.ordinal(local))

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
        nvshmem_bootstrap.join(nvshmem, exchange, workspaces.ordinal(local))
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
                device=workspaces.ordinal(local),
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
        is_captured = extension.load_cuda().is_captured(key, workspaces.ordinal(local))
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
            # For both waits: others may wait for their networks when this process is done.
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
    """Bytes of the longest inter-node row, and of the ids and weights that go with it."""
    config = geometry.config
    token_bytes = codes.max_token_bytes(config.token_format, config.hidden_size)
    row_bytes = max(workspaces.max_message_bytes(config), token_bytes)
    return row_bytes + 8 * geometry.routed.n_choices


@dataclasses.dataclass(frozen=True)
class Room:
    """What a process says of its GPU, the only one of the mesh that it has."""

    uuid: str
    n_sms: int  # multiprocessors that the process sees
    has_mps: bool  # whether processes run kernels on it at the same time


def room_problem(nvshmem: ModuleType, exchange: Exchange, device: int) -> str | None:
    """Why the exchange's kernels do not fit on a GPU, the same in all processes; None if they do.

    The blocks of an exchange wait for those of other ranks, so those of all ranks of a GPU must run
    at once, beside each other's intra-node calls: each rank has an equal share of the
    multiprocessors. Where processes take turns on a GPU, each has all of them during its turn.

    Args:
        nvshmem: the extension's part of that name.
        exchange: between the processes, all of which have one rank.
        device: CUDA ordinal of this process's rank.
    """
    answers = exchange("rail room", json.dumps(nvshmem.room(device)).encode())
    rooms = {
        process: Room(*sent_json(process, answer, _is_room, "what its GPU has room for"))
        for process, answer in zip(exchange.processes, answers, strict=True)
    }
    return why_no_room(rooms, nvshmem.n_blocks)


def why_no_room(rooms: Mapping[int, Room], n_blocks: int) -> str | None:
    """Which ranks have fewer than `n_blocks` multiprocessors; None if none has. By process."""
    sharing = collections.defaultdict(list)
    for process, room in rooms.items():
        sharing[room.uuid].append(process)
    for processes in sharing.values():
        there = [rooms[process] for process in processes]
        n_sms = min(room.n_sms for room in there)
        most = n_sms // n_blocks
        needs = f"an inter-node exchange needs {n_blocks} multiprocessors for each rank"
        if most == 0:
            return f"{needs}; the GPU of process {processes[0]} has {n_sms}. Use transport='p2p'."
        if len(processes) > most and any(room.has_mps for room in there):
            *others, last = map(str, processes)
            return (
                f"{needs}; processes {', '.join(others)} and {last} share a GPU of {n_sms} by "
                f"MPS. Let at most {most} share it, or end MPS: then they take turns."
            )
    return None


def _is_room(x: object) -> bool:
    return has_types(x, str, int, bool) and type(x[1]) is int and x[1] > 0  # type: ignore[index]
