"""Selects a transport, checks that the group fits a given memory, and opens a connection."""

import dataclasses
import functools
import logging
from typing import Any

from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.nodes.connection import HostByNodes, NodesConnection, P2pByNodes
from jax_ep.nodes.nvshmem.connection import NvshmemByNodes
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import workspaces
from jax_ep.transports.base import Connection
from jax_ep.transports.host import HostConnection
from jax_ep.transports.p2p import P2pConnection
from jax_ep.transports.xla import XlaConnection

_log = logging.getLogger("jax_ep")

# The choices of "auto". A transport by nodes comes right after the one that it has inside.
_FASTEST_FIRST: tuple[type[Connection], ...] = (
    P2pConnection,
    P2pByNodes,
    HostConnection,
    HostByNodes,
    XlaConnection,
)
# Errors of a network end the process in NVSHMEM, so users choose it themselves.
_ON_REQUEST: tuple[type[Connection], ...] = (NvshmemByNodes,)

_ONE_NODE = "it serves several nodes, and the ranks form one; see EPConfig.n_nodes."
_NO_TRAVEL = "it serves several nodes, and with skip_a2a nothing travels between ranks."

# Names of all transports, the fastest first.
NAMES = tuple(dict.fromkeys(each.name for each in (*_FASTEST_FIRST, *_ON_REQUEST)))


def connect(requested: Geometry, exchange: Exchange) -> Connection:
    """Opens a connection of the requested transport, or for `"auto"` of the fastest.

    Raises what `ep_init` does; then nothing is open, and the others learn why, if they can.
    """
    try:
        connection = _select(requested, exchange)
        connection.open(exchange)
        try:
            exchange.open()
        except BaseException as error:
            exchange.give_up(error)
            connection.abandon()
            raise
    except BaseException as error:
        exchange.give_up(error)
        raise
    return connection


def _select(requested: Geometry, exchange: Exchange) -> Connection:
    if requested.transport not in ("auto", *NAMES):
        known = ", ".join(map(repr, NAMES))
        raise ValueError(
            f"transport must be 'auto' or one of {known}; got {requested.transport!r}."
        )
    refused: dict[str, str] = {}  # why the transports tried before cannot serve
    is_auto = requested.transport == "auto"
    for transport in _FASTEST_FIRST if is_auto else (*_FASTEST_FIRST, *_ON_REQUEST):
        if not is_auto and transport.name != requested.transport:
            continue
        geometry = dataclasses.replace(requested, transport=transport.name)
        if issubclass(transport, NodesConnection):
            geometry = _with_nodes(transport, geometry, exchange)
            if geometry.routed.n_nodes == 1:
                why = _NO_TRAVEL if geometry.config.skip_a2a else _ONE_NODE
                refused.setdefault(transport.name, why)
                continue
        reason = transport.unsupported_reason(geometry, exchange)
        if reason is None:
            if is_auto:
                _log_choice(geometry, issubclass(transport, NodesConnection), refused)
            return transport(_check_memory(geometry))
        if transport.name in refused:
            reason = f"{refused[transport.name]} Nor can it serve each node: {reason}"
        refused[transport.name] = reason
    why = refused[requested.transport]
    raise ValueError(f"Transport {requested.transport!r} cannot serve: {why}")


def _with_nodes(
    transport: type[NodesConnection], geometry: Geometry, exchange: Exchange
) -> Geometry:
    """The geometry with nodes: those of its config or, if it does not say, those of the devices."""
    config = geometry.config
    if config.skip_a2a or config.n_nodes is not None or config.n_gpus_per_node is not None:
        return geometry
    n_nodes = transport.find_nodes(geometry, exchange)
    if n_nodes == 1:
        return geometry
    return dataclasses.replace(geometry, config=dataclasses.replace(config, n_nodes=n_nodes))


def _check_memory(geometry: Geometry) -> Geometry:
    """The geometry, without `memory_of` if that is an equal group; ValueError: no fit."""
    memory = geometry.memory_of
    if memory is None:
        return geometry
    own = dataclasses.replace(geometry, memory_of=None)
    if own == memory:
        return own
    if (geometry.mesh, geometry.axis_name) != (memory.mesh, memory.axis_name):
        new, old = _describe_meshes(geometry, memory)
        raise ValueError(
            f"memory_of must be a group of the same mesh and axis; got {new}, it has {old}. "
            "Leave memory_of out for a group with memory of its own."
        )
    got = _shared(geometry)
    for name, wanted in _shared(memory).items():
        if got[name] != wanted:
            raise ValueError(
                f"memory_of must be a group with the same {name}; got {got[name]!r}, it has "
                f"{wanted!r}. Leave memory_of out for a group with memory of its own."
            )
    sizes = _sizes(geometry)
    for size, limit in _sizes(memory).items():
        if sizes[size] > limit:
            raise ValueError(
                f"memory_of must be a group with room for {size.format(sizes[size])}; it has room "
                f"for {size.format(limit)}. First make a group with the largest sizes of all, for "
                "its memory."
            )
    return geometry


def _describe_meshes(*geometries: Geometry) -> list[str]:
    """Mesh and axis of each geometry; with the devices, if only these differ."""
    meshes = [f"{each.mesh}, {each.axis_name!r}" for each in geometries]
    if len(set(meshes)) == len(meshes):
        return meshes
    return [f"{each.mesh} of devices {each.device_ids}" for each in geometries]


def _shared(geometry: Geometry) -> dict[str, Any]:
    """What groups in one memory must have in common."""
    config = geometry.config
    names = "n_experts", "expert_copies", "fused_shared_expert", "skip_a2a", "timeout_s"
    return {
        "transport": geometry.transport,
        **{name: getattr(config, name) for name in names},
        "(n_gpus_per_node, n_nodes)": config.nodes(geometry.n_ranks),
    }


def _sizes(geometry: Geometry) -> dict[str, int]:
    """What a group may have less of than its memory has room for."""
    config = geometry.config
    return {
        "top_k={}": config.top_k,
        "max_tokens_per_rank={}": config.max_tokens_per_rank,
        "{} bytes per token or row": workspaces.max_message_bytes(config),
    }


@functools.cache
def _log_once(level: int, message: str) -> None:
    _log.log(level, message)


def _log_choice(geometry: Geometry, by_nodes: bool, refused: dict[str, str]) -> None:
    """Says which transport `"auto"` took, and why no faster one; once for each such choice."""
    platform = geometry.mesh.devices.flat[0].platform
    could_be_faster = platform == "gpu" or (platform == "cpu" and not extension.has_host())
    is_slow = geometry.transport == "xla" and could_be_faster
    shape = ", ".join(f"{name}={size}" for name, size in geometry.mesh.shape.items())
    where = ""
    if by_nodes:
        where = f" inside {geometry.routed.n_nodes} nodes, with XLA between them"
        refused = {name: why for name, why in refused.items() if name != geometry.transport}
    lines = [
        f"Transport {geometry.transport!r} serves the axis {geometry.axis_name!r} of the mesh "
        f"({shape}) on {platform}{where}.",
        *(f"{name!r} cannot: {reason}" for name, reason in refused.items()),
    ]
    _log_once(logging.WARNING if is_slow else logging.INFO, " ".join(lines))
