"""Transports by nodes: one inside each node, rails between them."""

import dataclasses
from typing import ClassVar

from jax_ep.exchange.rules import CustomCalls
from jax_ep.geometry import Geometry
from jax_ep.nodes.calls import NodesCalls
from jax_ep.nodes.rails import Rails, XlaRails
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import workspaces
from jax_ep.transports.base import Connection
from jax_ep.transports.host import HostConnection
from jax_ep.transports.p2p import P2pConnection


class NodesConnection(Connection):
    """A mixin, which goes before the transport that it has inside: `inner_type`.

    `geometry` is that of the node, and `calls` are those of all nodes.
    """

    inner_type: ClassVar[type[Connection]]

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(intra_node(geometry))
        inner = self.calls
        assert isinstance(inner, CustomCalls)
        self.calls = NodesCalls(geometry, inner, self.make_rails(geometry, inner))

    def make_rails(self, geometry: Geometry, inner: CustomCalls) -> Rails:
        """Connects the nodes: by default, XLA's collectives."""
        return XlaRails(geometry)

    @classmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Requires that the transport can serve each node."""
        return cls.inner_type.unsupported_reason(intra_node(geometry), exchange)

    @classmethod
    def find_nodes(cls, geometry: Geometry, exchange: Exchange) -> int:
        """The nodes that the devices form, where the config does not say; 1 if not known."""
        return 1


def intra_node(geometry: Geometry) -> Geometry:
    """The geometry of the transport inside."""
    memory_of = geometry.memory_of and intra_node(geometry.memory_of)
    return dataclasses.replace(geometry, intra_node=True, memory_of=memory_of)


class HostByNodes(NodesConnection, HostConnection):
    """`host` inside nodes: the devices of a node belong to one process."""

    inner_type = HostConnection


class P2pByNodes(NodesConnection, P2pConnection):
    """`p2p` inside nodes: the devices of a node are on one host."""

    inner_type = P2pConnection

    @classmethod
    def find_nodes(cls, geometry: Geometry, exchange: Exchange) -> int:
        """The hosts that the ranks of each replica are on."""
        is_gpu = {device.platform for device in geometry.mesh.devices.flat} == {"gpu"}
        return workspaces.n_hosts(geometry, exchange) if is_gpu else 1
