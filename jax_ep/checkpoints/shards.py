"""Parameters from and to tensors of a checkpoint, shard by shard."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.checkpoints.tensors import Ranges, read, swap


class Part(NamedTuple):
    """A tensor, and the part of a parameter that it fills.

    Attributes:
        key: the tensor's.
        ranges: of the part, along each axis of the parameter.
        n_single: leading axes of the parameter that the tensor lacks.
        swapped: whether the tensor's last two axes are in each other's place.
    """

    key: str
    ranges: Ranges
    n_single: int
    swapped: bool


def load(
    name: str,
    target: Any,
    mesh: jax.sharding.Mesh,
    parts: Sequence[Part],
    tensors: Mapping[str, Any],
) -> jax.Array:
    """An array with the shape, dtype and sharding of `target`, read one shard at a time.

    `jax.make_array_from_callback` would hold the shards of all devices on the host at once, and
    read a shard once for each device that has it.
    """
    sharding: Any = getattr(target, "sharding", None)
    if sharding is None or isinstance(target, jax.core.Tracer):
        raise ValueError(
            f"Layout.load: {name} must be an array on devices, or abstract with a sharding; got "
            f"{target}. Call it outside of jax.jit, with a layer from nnx.eval_shape."
        )
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        sharding = jax.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    holders: dict[Ranges, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(target.shape).items():
        holders.setdefault(_ranges(index, target.shape), []).append(device)
    arrays: list[jax.Array] = []
    for ranges, devices in holders.items():
        shard = np.empty(_sizes(ranges), target.dtype)
        for part in parts:
            _fill(shard, ranges, part, tensors)
        for device in devices:
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(shard, place))
        jax.block_until_ready(arrays)  # before the next shard takes memory of the host
    return jax.make_array_from_single_device_arrays(target.shape, sharding, arrays)


def own_shards(array: jax.Array) -> list[tuple[Ranges, jax.Array]]:
    """The shards that this process saves, each with its ranges of the array: no replicas."""
    return [
        (_ranges(shard.index, array.shape), shard.data)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def gather(shards: list[tuple[Ranges, jax.Array]], part: Part) -> np.ndarray | None:
    """A tensor as it is stored; None if this process has none of it."""
    sizes, tensor, n_found = _sizes(part.ranges), None, 0
    for ranges, data in shards:
        common = _common(ranges, part.ranges)
        if common:
            starts = np.asarray([begin for begin, _ in _within(common, ranges)], np.int32)
            # The caller may have set a mesh, on all of whose devices jit would want the data.
            with jax.set_mesh(jax.sharding.Mesh([*data.devices()], "device")):
                values = np.asarray(_take(data, starts, _sizes(common), part.swapped))
            place = _within(common, part.ranges)
            if tensor is None:
                tensor = np.empty(swap(sizes) if part.swapped else sizes, values.dtype)
            tensor[_slices(swap(place) if part.swapped else place)] = values
            n_found += values.size
    if tensor is not None and n_found < tensor.size:
        raise ValueError(
            f"Layout.save: {part.key!r} must be on devices of one process; got {n_found} of its "
            f"{tensor.size} numbers in process {jax.process_index()}. Reshard the layer."
        )
    return None if tensor is None else tensor[(0,) * part.n_single]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _take(data: jax.Array, starts: Any, sizes: tuple[int, ...], swapped: bool) -> jax.Array:
    values = lax.dynamic_slice(data, [*starts], sizes)
    return values.swapaxes(-1, -2) if swapped else values


def _fill(shard: np.ndarray, ranges: Ranges, part: Part, tensors: Mapping[str, Any]) -> None:
    """Fills what a shard, with these ranges of a parameter, has of a part."""
    common = _common(ranges, part.ranges)
    if common is None:
        return
    n = part.n_single
    values = shard[_slices(_within(common, ranges))][(0,) * n]
    wanted, shape = _within(common, part.ranges)[n:], _sizes(part.ranges[n:])
    if part.swapped:
        values, wanted, shape = values.swapaxes(-1, -2), swap(wanted), swap(shape)
    as_codes = values.dtype == jnp.float8_e4m3fn
    if values.ndim < 3:
        values[...] = read(tensors, part.key, shape, wanted, as_codes)
        return
    for expert, each in zip(range(*wanted[0]), values, strict=True):  # to need little memory
        one = (expert, expert + 1), *wanted[1:]
        each[...] = read(tensors, part.key, shape, one, as_codes)[0]


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Ranges:
    bounds = [each.indices(size) for each, size in zip(index, shape, strict=True)]
    return tuple((begin, end) for begin, end, _ in bounds)


def _sizes(ranges: Ranges) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in ranges)


def _slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in ranges)


def _common(a: Ranges, b: Ranges) -> Ranges | None:
    """What both have, or None."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(begin < end for begin, end in both) else None


def _within(ranges: Ranges, outer: Ranges) -> Ranges:
    """Counted from where the outer ones begin."""
    pairs = zip(ranges, outer, strict=True)
    return tuple((begin - first, end - first) for (begin, end), (first, _) in pairs)
