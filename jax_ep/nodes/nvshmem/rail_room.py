"""Room for the kernels of the inter-node exchange, on GPUs that several processes use.

The blocks of an exchange wait for those of other ranks, so those of all ranks of a GPU must run at
once, beside each other's intra-node calls: each rank has an equal share of the multiprocessors.
Where processes take turns on a GPU, each has all of them during its turn.
"""

import collections
import dataclasses
import json
from collections.abc import Mapping
from types import ModuleType

from jax_ep.processes.exchange import Exchange
from jax_ep.processes.messages import has_types, sent_json


@dataclasses.dataclass(frozen=True)
class Room:
    """What a process says of its GPU, the only one of the mesh that it has."""

    uuid: str
    n_sms: int  # multiprocessors that the process sees
    has_mps: bool  # whether processes run kernels on it at the same time


def unsupported_reason(nvshmem: ModuleType, exchange: Exchange, device: int) -> str | None:
    """Why the exchange's kernels do not fit on a GPU, the same in all processes; None if they do.

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
