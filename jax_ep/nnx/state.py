"""The state of a layer: its parameters, each shard on its device; its bias; its placement."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from jax_ep.group import EPGroup
from jax_ep.layer.quantize_weights import QuantizedWeights, quantize_weights
from jax_ep.nnx.token_axes import Axes
from jax_ep.placement.expert_placement import ExpertPlacement, check_is_placement, check_placement
from jax_ep.router import update_bias

_TABLES = ("physical_to_logical", "copies", "first")  # of an ExpertPlacement


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Makes parameters with sharding metadata: the axes given for their dimensions."""

    mesh: jax.sharding.Mesh
    kernel_init: nnx.Initializer | None
    dtype: Any
    rngs: nnx.Rngs

    def matrix(self, shape: tuple[int, ...], *spec: Axes, transposed: bool = False) -> nnx.Param:
        """A matrix `[n_in, n_out]`, or one per expert; `[n_out, n_in]` if `transposed`."""
        init = _by_expert(self.kernel_init or nnx.initializers.lecun_normal(), transposed)
        if transposed:
            shape, spec = _swap(shape), _swap(spec)
        create = nnx.with_partitioning(init, spec, mesh=self.mesh)
        return nnx.Param(create(self.rngs.params(), shape, self.dtype))

    def bias(self, shape: tuple[int, ...], *spec: Axes) -> nnx.Param:
        """A bias, zero at first."""
        create = nnx.with_partitioning(jnp.zeros, spec, mesh=self.mesh)
        return nnx.Param(create(shape, self.dtype))

    def zeros(self, shape: tuple[int, ...], *spec: Axes) -> Any:
        """float32 zeros, for state that is no parameter."""
        return nnx.with_partitioning(jnp.zeros, spec, mesh=self.mesh)(shape, jnp.float32)


def hidden_axis(name: str, transposed: bool) -> int:
    """The axis of H in `gate_up` or `down`, which FSDP shards."""
    return 2 if (name == "down") != transposed else 1


def quantize_experts(layer: Any) -> None:
    """Replaces the matrices of a layer, or of stacked layers, by codes."""
    mesh, dtype = layer.group.mesh, layer.group.config.combine_dtype
    spec = *[None] * (layer.gate_up.ndim - 3), layer.group.axis_name, None, None

    def quantize(weights: jax.Array) -> QuantizedWeights:
        if weights.ndim > 3:
            return jax.vmap(quantize)(weights)
        weights = weights.astype(dtype)
        return quantize_weights(weights, transposed=layer.transposed, differentiable=False)

    convert = jax.jit(quantize, out_shardings=jax.NamedSharding(mesh, P(*spec)))
    for name in ("gate_up", "down"):
        quantized = convert(getattr(layer, name)[...])
        for suffix, array in (("", quantized.codes), ("_scales", quantized.scales)):
            create = nnx.with_partitioning(lambda x: x, spec, mesh=mesh)
            setattr(layer, name + suffix, ExpertCodes(create(array)))


def move_bias(mesh: jax.sharding.Mesh, bias: jax.Array, load: Any, rate: Any) -> jax.Array:
    """`update_bias`; between steps as one program, whose operands no transfer guard stops."""
    if isinstance(bias, jax.core.Tracer) or not isinstance(load, jax.Array):
        return update_bias(bias, load, rate)
    if not isinstance(rate, jax.Array):
        everywhere = jax.NamedSharding(mesh, P())
        puts = [jax.device_put(np.float32(rate), each) for each in everywhere.addressable_devices]
        rate = jax.make_array_from_single_device_arrays((), everywhere, puts)
    return _update_bias(bias, load, rate)


_update_bias = jax.jit(update_bias)


def _by_expert(init: nnx.Initializer, transposed: bool) -> Callable[..., jax.Array]:
    """Initializes each matrix of `[E, n_in, n_out]` by itself; the same numbers if transposed."""

    def create(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if transposed:
            return create_plain(key, _swap(shape), dtype).swapaxes(-1, -2)
        return create_plain(key, shape, dtype)

    def create_plain(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if len(shape) == 2:
            return init(key, shape, dtype)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return create


def _swap(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """With the last two in each other's place."""
    return (*values[:-2], values[-1], values[-2])


class RouterBias(nnx.Variable):
    """The bias that only selects experts: state, not a parameter, so no gradient changes it."""


class ExpertCodes(nnx.Variable):
    """Experts' weights as e4m3 codes, or their scales: state, as no gradient reaches them."""


class PlacementTable(nnx.Variable):
    """An array of an `ExpertPlacement`: state, not a parameter, as no gradient reaches it."""


class Placement(nnx.Module):
    """The `ExpertPlacement` of a layer, replicated on the group's mesh.

    Attributes:
        physical_to_logical, copies, first: `PlacementTable`, as in `ExpertPlacement`.
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
        check_is_placement("Placement.set", placement)
        is_, was = _sizes(placement), _sizes(self.get())
        if is_ != was:
            raise ValueError(f"Placement.set: the placement must have {was}; got {is_}.")
        for name in _TABLES:
            table, values = getattr(self, name), getattr(placement, name)
            is_traced = isinstance(table[...], jax.core.Tracer)
            table[...] = values if is_traced else jax.device_put(values, table[...].sharding)


def _sizes(placement: ExpertPlacement) -> str:
    """What a program is compiled for."""
    shape = placement.physical_to_logical.shape
    return (
        f"physical_to_logical {list(shape)}, E={placement.n_experts}, R={placement.n_ranks}, "
        f"local_first={placement.local_first}"
    )
