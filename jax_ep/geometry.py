"""Geometry: which device of a mesh is which rank, and the sizes that follow from it."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jax_ep.config import EPConfig, RoutedSizes


@dataclasses.dataclass(frozen=True)
class MeshCoordinate:
    """A device's position in a mesh. Each replica is an expert-parallel group of its own."""

    device: jax.Device
    replica: int  # index over the mesh's other axes
    rank: int  # index along the expert-parallel axis, or over the product of several


@dataclasses.dataclass(frozen=True, eq=False)
class Geometry:
    """Mesh, ranks and sizes of an expert-parallel group: a static parameter of traced calls.

    Immutable and hashable. It holds no resources; a transport's connection does.

    Raises:
        ValueError: the mesh has no such axis, or the config does not fit the number of ranks.
    """

    mesh: jax.sharding.Mesh
    axis_name: str | tuple[str, ...]  # one or more axes along which ranks are counted, in order
    config: EPConfig
    transport: str  # name of the transport
    intra_node: bool = False  # of a transport inside nodes: see RoutedSizes, nodes/connection.py
    # The group whose memory this group uses; None: its own. group/select.py checks that it fits.
    memory_of: "Geometry | None" = None

    def __post_init__(self) -> None:
        names = self.axis_names
        are_axes = len(names) > 0 and all(name in self.mesh.axis_names for name in names)
        if not are_axes or len(set(names)) < len(names):
            raise ValueError(
                "axis_name must be the name of one axis of the mesh, or a tuple of different ones; "
                f"got {self.axis_name!r}, the mesh has {self.mesh.axis_names}."
            )
        # A tuple of one axis, or a subclass of str, makes the same group.
        names = tuple(self.mesh.axis_names[self.mesh.axis_names.index(name)] for name in names)
        object.__setattr__(self, "axis_name", names[0] if len(names) == 1 else names)
        self.config.n_local_experts(self.n_ranks)
        self.config.max_recv_tokens(self.n_ranks)
        self.config.nodes(self.n_ranks)

    @functools.cached_property
    def key(self) -> str:
        """Names the group in compiled programs, which outlive processes: it is the same in all."""
        name = self.config.name
        key = (
            f"{'' if name is None else f'{name}-'}{self.transport}-ep{self.n_ranks}-{self._digest}"
        )
        return f"{key}-intra-node" if self.intra_node else key

    def call(self, operation: str) -> str:
        """A call of the group, for messages: with the group's name, if it has one."""
        name = self.config.name
        return operation if name is None else f"{operation} of group {name}"

    @functools.cached_property
    def _digest(self) -> str:
        device_ids = self.device_ids
        shape = tuple(self.mesh.shape.items())
        facts: tuple[Any, ...] = (shape, device_ids, self.axis_name, self.config, self.transport)
        if self.memory_of is not None:
            facts = (*facts, self.memory_of._digest)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @property
    def device_ids(self) -> list[int]:
        """The ids of the mesh's devices, in mesh order."""
        return [device.id for device in self.mesh.devices.flat]

    @property
    def memory_key(self) -> str:
        """Names the memory: the key of the group that it was set up for."""
        return self.key if self.memory_of is None else self.memory_of.key

    @property
    def axis_names(self) -> tuple[str, ...]:
        """`axis_name` as a tuple."""
        name = self.axis_name
        return tuple(name) if isinstance(name, tuple | list) else (name,)

    @property
    def n_ranks(self) -> int:
        """Ranks (R): the product of the sizes of the axes."""
        return math.prod(self.mesh.shape[name] for name in self.axis_names)

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
        return self.config.routed(self.n_ranks, self.intra_node)

    @property
    def max_routed_tokens(self) -> int:
        """Tokens that a rank may bring to a call of the transport: M, or M per node."""
        return self.config.max_tokens_per_rank * self.routed.n_source_nodes

    @functools.cached_property
    def coordinates(self) -> tuple[MeshCoordinate, ...]:
        """The coordinate of every device, in mesh order."""
        axes = [self.mesh.axis_names.index(name) for name in self.axis_names]
        last = range(-len(axes), 0)
        replicas = np.moveaxis(self.mesh.devices, axes, last).reshape(-1, self.n_ranks)
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
        """Among ranks that exchange tokens; each node, or device with `skip_a2a`, is a replica."""
        size = self.routed.n_ranks
        each = self.n_ranks // size
        return [
            MeshCoordinate(c.device, c.replica * each + c.rank // size, c.rank % size)
            for c in coordinates
        ]

    @functools.cached_property
    def routed_replicas(self) -> tuple[tuple[MeshCoordinate, ...], ...]:
        """The devices that exchange tokens with each other, by replica, in rank order."""
        replicas: dict[int, list[MeshCoordinate]] = {}
        for each in self.routed_coordinates(self.coordinates):
            replicas.setdefault(each.replica, []).append(each)
        return tuple(
            tuple(sorted(replicas[i], key=lambda each: each.rank)) for i in sorted(replicas)
        )

    @property
    def peers(self) -> str:
        """The devices that exchange tokens, for messages."""
        if not self.intra_node:
            return f"devices along the axis {self.axis_name!r}"
        n_ranks = self.routed.n_ranks
        return f"devices of a node, {n_ranks} consecutive ranks along the axis {self.axis_name!r},"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Geometry) and (self.key, self.mesh) == (other.key, other.mesh)

    def __hash__(self) -> int:
        return hash(self.key)


def check_mesh(mesh: Any) -> None:
    """Requires a mesh that has devices, each once."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh, which has devices; got an AbstractMesh, which is "
            "all that JAX knows while it traces. Call ep_init outside of jax.jit, with the mesh "
            "itself or jax.sharding.get_mesh(), and let the traced function close over the group."
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh; got {type(mesh).__name__}.")
    coords: dict[jax.Device, tuple[int, ...]] = {}
    for coord, device in np.ndenumerate(mesh.devices):
        if device in coords:
            raise ValueError(
                f"each device must be in the mesh once; device {device.id} is at {coords[device]} "
                f"and at {coord} of the mesh {dict(mesh.shape)}."
            )
        coords[device] = coord
