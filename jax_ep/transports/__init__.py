"""The transports, and the choice among them."""

from __future__ import annotations

import jax

from jax_ep.config import EPConfig
from jax_ep.exchange import Exchange
from jax_ep.transports.base import COMBINE_NAME, DISPATCH_NAME, Transport
from jax_ep.transports.host import HostTransport
from jax_ep.transports.p2p import P2pTransport
from jax_ep.transports.xla import XlaTransport

__all__ = ["COMBINE_NAME", "DISPATCH_NAME", "NAMES", "Transport", "choose"]

_FASTEST_FIRST: tuple[Transport, ...] = (
    P2pTransport(),
    HostTransport(),
    XlaTransport(),
)

# Of all transports, the fastest first.
NAMES = tuple(transport.name for transport in _FASTEST_FIRST)


def choose(
    name: str,
    mesh: jax.sharding.Mesh,
    axis_name: str,
    config: EPConfig,
    exchange: Exchange,
) -> Transport:
    """The transport called `name`, or the fastest that can serve for `"auto"`.

    Raises:
        ValueError: there is none of that name, or it cannot serve the mesh.
    """
    if name == "auto":
        return next(
            transport
            for transport in _FASTEST_FIRST
            if transport.why_not(mesh, axis_name, config, exchange) is None
        )
    for transport in _FASTEST_FIRST:
        if transport.name == name:
            reason = transport.why_not(mesh, axis_name, config, exchange)
            if reason is not None:
                raise ValueError(f"Transport {name!r} cannot serve: {reason}")
            return transport
    known = ", ".join(repr(transport.name) for transport in _FASTEST_FIRST)
    raise ValueError(f"transport must be 'auto' or one of {known}; got {name!r}.")
