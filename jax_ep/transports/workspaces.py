"""The workspaces of `p2p`, which all processes of a group open and close together."""

import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ep.config import EPConfig
from jax_ep.exchange.checks import VECTOR_BYTES
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry, MeshCoordinate
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.messages import encodable, has_types, sent_json

# How long close() waits for a peer, which may be dead.
_MAX_CLOSE_S = 10.0


def ordinal(coordinate: MeshCoordinate) -> int:
    """The device's CUDA ordinal in this process, by which handlers know it."""
    return coordinate.device.local_hardware_id


def row_bytes(config: EPConfig) -> tuple[int, int]:
    """Bytes of a row that dispatch returns, and of one that combine takes."""
    return (
        config.token_format.payload_bytes(config.hidden_size),
        config.hidden_size * config.sum_dtype.itemsize,
    )


def max_message_bytes(config: EPConfig) -> int:
    """Upper bound on the bytes that travel per token; gradients go both ways."""
    sent = config.token_format.token_bytes(config.hidden_size)
    sent = -(-sent // VECTOR_BYTES) * VECTOR_BYTES
    return max(sent, *row_bytes(config))


def unsupported_reason(geometry: Geometry, exchange: Exchange) -> str | None:
    """Why the processes cannot connect their devices, the same in all; None if they can."""
    if not geometry.local_coordinates:
        return "this process holds no device of the mesh."
    host, reason = _host_and_reason(geometry)
    if exchange.is_alone:
        return reason
    step = "intra-node choice" if geometry.intra_node else "choice"
    records = exchange(step, json.dumps([host, reason and encodable(reason)]).encode())
    answers = {
        process: sent_json(
            process, record, lambda x: has_types(x, str, str | None), "what it says of its host"
        )
        for process, record in zip(exchange.processes, records, strict=True)
    }
    for process, (_, reason) in answers.items():
        if reason is not None:
            return f"process {process}: {reason}"
    return _split_replica(geometry, {process: host for process, (host, _) in answers.items()})


def _host_and_reason(geometry: Geometry) -> tuple[str, str | None]:
    """This host's identity, and what keeps this process from taking part."""
    try:
        load = extension.load_cuda()
    except ImportError as error:
        return "", extension.why_missing("_ffi_cuda", error)
    here = {each.device for each in geometry.local_coordinates}
    for replica in geometry.routed_replicas:
        local = [ordinal(each) for each in replica if each.device in here]
        reason = load.peer_access_problem(local) if local else ""
        if reason:
            return load.host_identity(), reason
    return load.host_identity(), None


def _split_replica(geometry: Geometry, hosts: dict[int, str]) -> str | None:
    """Which devices that exchange tokens are on different hosts; `hosts` by process."""
    for replica in geometry.routed_replicas:
        first, *others = (each.device.process_index for each in replica)
        for process in others:
            if hosts[process] != hosts[first]:
                has_nodes = geometry.routed.n_nodes > 1 or geometry.intra_node
                hint = "" if has_nodes else "give the number of hosts as EPConfig(n_nodes=...), or "
                return (
                    f"process {process} is on another host than process {first}, and all "
                    f"{geometry.peers} must be on one host; {hint}use transport='xla'."
                )
    return None


def n_hosts(geometry: Geometry, exchange: Exchange) -> int:
    """Hosts that the ranks of each replica are on, the same in all processes that have ranks.

    1 if they do not split the ranks into as many nodes: consecutive ranks, equally many on each.
    """
    if not geometry.local_coordinates:
        return 1
    try:
        host = extension.load_cuda().host_identity()
    except ImportError:
        host = ""
    if exchange.is_alone:
        return 1
    answers = exchange("hosts", host.encode())
    hosts = dict(zip(exchange.processes, answers, strict=True))
    splits = {
        _split([hosts[each.device.process_index] for each in replica])
        for replica in geometry.routed_replicas
    }
    return splits.pop() if len(splits) == 1 and all(answers) else 1


def _split(hosts: Sequence[bytes]) -> int:
    """The number of runs of equal hosts, if all are equally long and of different hosts; else 1."""
    runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts)]
    is_even = len(set(dict(runs).values())) == 1
    return len(runs) if is_even and len(dict(runs)) == len(runs) else 1


def share_workspaces(geometry: Geometry) -> bool:
    """Opens the group in workspaces of its `memory_key`; False if there are none."""
    load = extension.load_cuda()
    return load.share_group(geometry.key, geometry.memory_key, _group_config(geometry))


def open_workspaces(geometry: Geometry, exchange: Exchange) -> None:
    """Allocates this process's workspaces and connects them with all others."""
    load, key = extension.load_cuda(), geometry.key
    local = geometry.routed_coordinates(geometry.local_coordinates)
    devices = [(ordinal(each), each.replica, each.rank) for each in local]

    def allocate() -> bytes:
        return b"".join(load.allocate_group(key, _group_config(geometry), devices))

    def connect() -> bytes:
        load.connect_group(key, list(_peers(geometry, exchange, payloads)))
        return b""

    try:
        payloads = exchange.gather("workspaces", allocate)
    except BaseException:  # no process has the addresses
        if disconnect(key):
            load.free_group(key)
        raise
    try:
        exchange.gather("connected", connect)
    except BaseException:
        if disconnect(key):
            free_workspaces(key, exchange)
        raise


def _group_config(geometry: Geometry) -> Any:
    """The group's sizes and limits, for the extension."""
    config = geometry.config
    return extension.load_cuda().GroupConfig(
        **geometry.routed._asdict(),
        max_tokens_per_rank=geometry.max_routed_tokens,
        row_alignment=config.group_alignment,
        row_bytes=max_message_bytes(config),
        n_sms=config.n_sms or 0,
        timeout_s=config.timeout_s,
    )


def _peers(
    geometry: Geometry, exchange: Exchange, payloads: Sequence[bytes]
) -> Iterator[tuple[int, int, bytes]]:
    """(replica, rank, address) of every device; each payload is one process's."""
    everywhere = geometry.routed_coordinates(geometry.coordinates)
    for process, payload in zip(exchange.processes, payloads, strict=True):
        there = [each for each in everywhere if each.device.process_index == process]
        size, rest = divmod(len(payload), len(there))
        if rest:
            raise RuntimeError(
                f"process {process} must send {len(there)} addresses of equal length; it sent "
                f"{len(payload)} bytes. All processes must run the same version of jax_ep."
            )
        for i, each in enumerate(there):
            yield each.replica, each.rank, payload[i * size : (i + 1) * size]


def disconnect(key: str) -> bool:
    """Removes a user of a group; True if no other is left: then call `free_workspaces`."""
    return extension.load_cuda().disconnect_group(key)


def free_workspaces(memory_key: str, exchange: Exchange) -> None:
    """Frees the workspaces after waiting a limited time for the others to disconnect.

    A process that has not disconnected may still write to them. Memory that CUDA graphs refer to is
    kept for the next workspaces of the key.
    """
    try:
        exchange.close("closed", _MAX_CLOSE_S)
    except Exception as error:
        warnings.warn(
            f"Group {memory_key} is closed here but may still be open in another process, which "
            f"must not call it any more: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
    finally:
        extension.load_cuda().free_group(memory_key)
