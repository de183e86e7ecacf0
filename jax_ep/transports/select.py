"""Selects a transport and opens a connection."""

import dataclasses

from jax_ep.connection import Connection
from jax_ep.exchange import Exchange
from jax_ep.geometry import Geometry
from jax_ep.transports.host import HostConnection
from jax_ep.transports.p2p import P2pConnection
from jax_ep.transports.xla import XlaConnection

_FASTEST_FIRST: tuple[type[Connection], ...] = (P2pConnection, HostConnection, XlaConnection)

# Of all transports, the fastest first.
NAMES = tuple(each.name for each in _FASTEST_FIRST)


def connect(requested: Geometry, exchange: Exchange) -> Connection:
    """Opens a connection of the requested transport, or for `"auto"` of the fastest.

    Raises what `ep_init` does.
    """
    connection = _select(requested, exchange)
    connection.open(exchange)
    return connection


def _select(requested: Geometry, exchange: Exchange) -> Connection:
    for transport in _FASTEST_FIRST:
        if requested.transport not in ("auto", transport.name):
            continue
        geometry = dataclasses.replace(requested, transport=transport.name)
        reason = transport.unsupported_reason(geometry, exchange)
        if reason is None:
            return transport(geometry)
        if requested.transport != "auto":
            raise ValueError(f"Transport {transport.name!r} cannot serve: {reason}")
    known = ", ".join(map(repr, NAMES))
    raise ValueError(f"transport must be 'auto' or one of {known}; got {requested.transport!r}.")
