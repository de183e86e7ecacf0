"""The groups of all integrations: one per mesh and sizes, opened when a layer is first traced."""

import jax

from jax_ep.config import EPConfig
from jax_ep.group import EPGroup, ep_init

_groups: dict[tuple[jax.sharding.Mesh, str | tuple[str, ...], EPConfig, str], EPGroup] = {}


def groups() -> list[EPGroup]:
    """Returns the open groups: to call their `stats` and `check`, or to `close` them."""
    return [group for group in _groups.values() if not group.closed]


def group_of(
    mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...], config: EPConfig, transport: str
) -> EPGroup:
    """The open group of these arguments of `ep_init`, which is called for the first of them."""
    key = mesh, axis_name, config, transport
    if key not in _groups or _groups[key].closed:
        _groups[key] = ep_init(*key)
    return _groups[key]
