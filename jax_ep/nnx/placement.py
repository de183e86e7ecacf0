"""Placement: where the experts of a layer are, as state that a training loop may replace."""

from typing import Any

import jax
from flax import nnx

from jax_ep.group import EPGroup
from jax_ep.placement.expert_placement import ExpertPlacement, check_placement

_TABLES = ("physical_to_logical", "copies", "first")


class PlacementTable(nnx.Variable):
    """An array of an `ExpertPlacement`: state, not a parameter, as no gradient reaches it."""


class Placement(nnx.Module):
    """The `ExpertPlacement` of a layer, replicated on the group's mesh.

    Attributes:
        physical_to_logical: `PlacementTable`, as in `ExpertPlacement`.
        copies: likewise.
        first: likewise.
    """

    def __init__(self, group: EPGroup, placement: ExpertPlacement) -> None:
        """Made by `MoE`."""
        check_placement("nnx.MoE", group, placement)
        self.n_ranks, self.local_first = placement.n_ranks, placement.local_first

        def create(table: jax.Array) -> Any:
            spec = (None,) * table.ndim
            return nnx.with_partitioning(lambda: table, spec, mesh=group.mesh)()

        for name in _TABLES:
            setattr(self, name, PlacementTable(create(getattr(placement, name))))

    def get(self) -> ExpertPlacement:
        """The placement; in layers stacked by `nnx.vmap`, its arrays have an axis of layers."""
        tables = [getattr(self, name)[...] for name in _TABLES]
        return ExpertPlacement.tree_unflatten((self.n_ranks, self.local_first), tables)

    def set(self, placement: ExpertPlacement) -> None:
        """Replaces the placement; compiled functions that take the layer need no compilation.

        May be called inside `nnx.jit`, such as with `layer.placement.get().mask_ranks(mask)`.

        Args:
            placement: has the same numbers of experts and ranks, and the same `local_first`. For
                layers stacked by `nnx.vmap`, placements stacked by `jax.tree.map`.

        Raises:
            TypeError: `placement` is not an `ExpertPlacement`.
            ValueError: `placement` has other sizes.
        """
        if not isinstance(placement, ExpertPlacement):
            raise TypeError(
                "Placement.set: placement must be an ExpertPlacement; got "
                f"{type(placement).__name__}."
            )
        is_, was = _sizes(placement), _sizes(self.get())
        if is_ != was:
            raise ValueError(f"Placement.set: the placement must have {was}; got {is_}.")
        for name in _TABLES:
            table, values = getattr(self, name), getattr(placement, name)
            is_traced = isinstance(table[...], jax.core.Tracer)
            table[...] = values if is_traced else jax.device_put(values, table[...].sharding)


def create_placement(
    group: EPGroup, placement: ExpertPlacement | None
) -> tuple[Placement | None, int]:
    """The state, if there is a placement, and the number of logical experts (E)."""
    if placement is None:
        return None, group.config.n_experts
    state = Placement(group, placement)
    return state, placement.n_experts


def _sizes(placement: ExpertPlacement) -> str:
    """What a program is compiled for."""
    shape = placement.physical_to_logical.shape
    return (
        f"physical_to_logical {list(shape)}, E={placement.n_experts}, R={placement.n_ranks}, "
        f"local_first={placement.local_first}"
    )
