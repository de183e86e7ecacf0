"""Geometry: which device of a mesh is which rank, and the sizes that follow from it."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable

import jax
import numpy as np

from jax_ep.config import EPConfig, RoutedSizes


@dataclasses.dataclass(frozen=True)
class MeshCoordinate:
    """A device's position in a mesh. Each replica is an expert-parallel group of its own."""

    device: jax.Device
    replica: int  # index over the mesh's other axes
    rank: int  # index along the expert-parallel axis


@dataclasses.dataclass(frozen=True, eq=False)
class Geometry:
    """Mesh, ranks and sizes of an expert-parallel group: a static parameter of traced calls.

    Immutable and hashable. It holds no resources; a transport's connection does.

    Raises:
        ValueError: the mesh has no such axis, or the config does not fit its size.
    """

    mesh: jax.sharding.Mesh
    axis_name: str  # the mesh axis along which ranks are counted
    config: EPConfig
    transport: str  # name of the transport

    def __post_init__(self) -> None:
        if self.axis_name not in self.mesh.axis_names:
            raise ValueError(
                f"axis_name must be the name of one axis of the mesh; got {self.axis_name!r}, the "
                f"mesh has {self.mesh.axis_names}."
            )
        self.config.n_local_experts(self.n_ranks)
        self.config.max_recv_tokens(self.n_ranks)
        self.config.nodes(self.n_ranks)

    @functools.cached_property
    def key(self) -> str:
        """Names the group in compiled programs.

        Programs outlive processes, so equal ids, axis and config give the same key everywhere.
        """
        device_ids = [device.id for device in self.mesh.devices.flat]
        shape = tuple(self.mesh.shape.items())
        facts = (shape, device_ids, self.axis_name, self.config, self.transport)
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        return f"{self.transport}-ep{self.n_ranks}-{digest}"

    @property
    def n_ranks(self) -> int:
        """Ranks (R): the size of the mesh axis."""
        return self.mesh.shape[self.axis_name]

    @property
    def n_local_experts(self) -> int:
        """Experts per rank (L)."""
        return self.config.n_local_experts(self.n_ranks)

    @functools.cached_property
    def max_recv_tokens(self) -> int:
        """Rows of the output of dispatch (C)."""
        return self.config.max_recv_tokens(self.n_ranks)

    @functools.cached_property
    def routed(self) -> RoutedSizes:
        """The sizes that transports route by."""
        return self.config.routed(self.n_ranks)

    @functools.cached_property
    def coordinates(self) -> tuple[MeshCoordinate, ...]:
        """The coordinate of every device, in mesh order."""
        axis = self.mesh.axis_names.index(self.axis_name)
        replicas = np.moveaxis(self.mesh.devices, axis, -1).reshape(-1, self.n_ranks)
        where = {
            device: MeshCoordinate(device, replica, rank)
            for replica, devices in enumerate(replicas)
            for rank, device in enumerate(devices)
        }
        return tuple(where[device] for device in self.mesh.devices.flat)

    @functools.cached_property
    def local_coordinates(self) -> tuple[MeshCoordinate, ...]:
        """The coordinates of this process's devices, in mesh order."""
        process = jax.process_index(self.mesh.devices.flat[0].client)
        return tuple(c for c in self.coordinates if c.device.process_index == process)

    def routed_coordinates(self, coordinates: Iterable[MeshCoordinate]) -> list[MeshCoordinate]:
        """The coordinates of the same devices among the ranks that exchange tokens.

        With `skip_a2a`, each device is a replica of its own; otherwise nothing changes.
        """
        if not self.config.skip_a2a:
            return list(coordinates)
        return [MeshCoordinate(c.device, c.replica * self.n_ranks + c.rank, 0) for c in coordinates]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Geometry) and (self.key, self.mesh) == (other.key, other.mesh)

    def __hash__(self) -> int:
        return hash(self.key)
