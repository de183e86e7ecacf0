"""Selects a transport and opens a connection."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator

from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.nodes.connection import HostByNodes, NodesConnection, P2pByNodes
from jax_ep.nodes.nvshmem.connection import NvshmemByNodes
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import memory
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

# See `each_node_by_itself`.
_serves_nodes_apart = False

# Of all transports, the fastest first.
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


@contextlib.contextmanager
def each_node_by_itself(is_so: bool = True) -> Iterator[None]:
    """Groups opened meanwhile serve each node by itself, even where all could be served at once.

    For tests and benchmarks, which have one host; in all processes alike. Inside of another such
    context, `is_so=False` undoes it.
    """
    global _serves_nodes_apart
    before, _serves_nodes_apart = _serves_nodes_apart, is_so
    try:
        yield
    finally:
        _serves_nodes_apart = before


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
        if _must_leave_nodes_apart(transport, geometry):
            reason: str | None = "each node is to be served by itself."
        else:
            reason = transport.unsupported_reason(geometry, exchange)
        if reason is None:
            if is_auto:
                _log_choice(geometry, issubclass(transport, NodesConnection), refused)
            return transport(memory.check(geometry))
        if transport.name in refused:
            reason = f"{refused[transport.name]} Nor can it serve each node: {reason}"
        refused[transport.name] = reason
    why = refused[requested.transport]
    raise ValueError(f"Transport {requested.transport!r} cannot serve: {why}")


def _must_leave_nodes_apart(transport: type[Connection], geometry: Geometry) -> bool:
    is_intra_node = any(
        issubclass(each, NodesConnection) and each.inner_type is transport
        for each in _FASTEST_FIRST
    )
    return _serves_nodes_apart and is_intra_node and geometry.routed.n_nodes > 1


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


@functools.cache
def _log_once(level: int, message: str) -> None:
    _log.log(level, message)


def _log_choice(geometry: Geometry, by_nodes: bool, refused: dict[str, str]) -> None:
    """Says which transport `"auto"` took, and why no faster one; once for each such choice.

    A warning where GPUs, or CPUs for lack of the extension, are left with plain collectives.
    """
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
