"""Creates the parameters of a layer, each shard on its device, and moves its bias."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from jax_ep.nnx.token_axes import Axes
from jax_ep.router import update_bias


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
