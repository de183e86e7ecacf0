"""Which device of a mesh is which rank of which group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


@dataclasses.dataclass(frozen=True)
class Place:
    """A device's place in a mesh.

    Attributes:
        device: the device.
        row: which group of ranks, counted over the mesh's other axes.
        rank: index along the expert-parallel axis.
    """

    device: jax.Device
    row: int
    rank: int


def places(mesh: jax.sharding.Mesh, axis_name: str) -> tuple[Place, ...]:
    """The place of every device, in the order of the mesh."""
    axis = mesh.axis_names.index(axis_name)
    rows = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[axis_name])
    where = {
        device: (row, rank)
        for row, ranks in enumerate(rows)
        for rank, device in enumerate(ranks)
    }
    return tuple(Place(device, *where[device]) for device in mesh.devices.flat)


def local_places(mesh: jax.sharding.Mesh, axis_name: str) -> tuple[Place, ...]:
    """The places of this process's devices, in the order of the mesh."""
    process = jax.process_index(mesh.devices.flat[0].client)
    return tuple(
        place
        for place in places(mesh, axis_name)
        if place.device.process_index == process
    )


def exchange_places(group: EPGroup, here: Iterable[Place]) -> list[Place]:
    """Where the devices stand among those that exchange tokens.

    That is where they are; with `skip_a2a` each is a group of ranks of its own.
    """
    if not group.config.skip_a2a:
        return list(here)
    return [Place(p.device, p.row * group.n_ranks + p.rank, 0) for p in here]
