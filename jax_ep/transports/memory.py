"""The parameters that a group must share with the group whose memory it uses, on any transport.

docs/protocol.md, "Groups that share workspaces", says why this suffices.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_ep.geometry import Geometry
from jax_ep.transports import bootstrap


def check(geometry: Geometry) -> Geometry:
    """The geometry, without `memory_of` if that is an equal group; or ValueError: no fit."""
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
    for name, got, wanted in _equal(geometry, memory):
        if got != wanted:
            raise ValueError(
                f"memory_of must be a group with the same {name}; got {got!r}, it has {wanted!r}. "
                "Leave memory_of out for a group with memory of its own."
            )
    for size, got, limit in _limited(geometry, memory):
        if got > limit:
            raise ValueError(
                f"memory_of must be a group with room for {size.format(got)}; it has room for "
                f"{size.format(limit)}. First make a group with the largest sizes of all, for its "
                "memory."
            )
    return geometry


def _describe_meshes(*geometries: Geometry) -> list[str]:
    """Mesh and axis of each geometry; with the devices, if only these differ."""
    meshes = [f"{each.mesh}, {each.axis_name!r}" for each in geometries]
    if len(set(meshes)) == len(meshes):
        return meshes
    return [f"{each.mesh} of devices {each.device_ids}" for each in geometries]


def _equal(geometry: Geometry, memory: Geometry) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, value of the memory) of what must be equal."""
    yield "transport", geometry.transport, memory.transport
    for name in ("n_experts", "fused_shared_expert", "skip_a2a", "timeout_s"):
        yield name, getattr(geometry.config, name), getattr(memory.config, name)
    n_ranks = geometry.n_ranks
    nodes = geometry.config.nodes(n_ranks), memory.config.nodes(n_ranks)
    yield "(n_gpus_per_node, n_nodes)", nodes[0], nodes[1]


def _limited(geometry: Geometry, memory: Geometry) -> Iterator[tuple[str, int, int]]:
    """(size, with a placeholder for the number; value; limit) of what may be less."""
    for name in ("top_k", "max_tokens_per_rank"):
        yield f"{name}={{}}", getattr(geometry.config, name), getattr(memory.config, name)
    n_bytes = bootstrap.max_message_bytes
    yield "{} bytes per token or row", n_bytes(geometry.config), n_bytes(memory.config)
