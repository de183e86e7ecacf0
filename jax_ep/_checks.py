"""Checks of the public calls, while tracing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.formats import TokenFormat
from jax_ep.group import EPGroup
from jax_ep.results import Dispatched, InFlight


def check_place(operation: str, group: EPGroup) -> None:
    """The call stands inside a `jax.shard_map` over the group's mesh."""
    if not isinstance(group, EPGroup):
        raise TypeError(
            f"{operation}: group must be an EPGroup made by ep_init; got "
            f"{type(group).__name__}."
        )
    if group.closed:
        raise ValueError(
            f"{operation}: group {group.key} is closed. Make a new one by ep_init."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if group.axis_name not in mesh.manual_axes:
        raise ValueError(
            f"{operation} must be called inside jax.shard_map over the axis "
            f"{group.axis_name!r}; manual axes here: {tuple(mesh.manual_axes)}. "
            "Elsewhere XLA would gather and replicate the operands."
        )
    if set(mesh.manual_axes) != set(mesh.axis_names):
        raise ValueError(
            f"{operation}: all axes of the mesh must be manual; the mesh has "
            f"{tuple(mesh.axis_names)}, manual are {tuple(mesh.manual_axes)}. Leave "
            "out axis_names= of jax.shard_map, or name all axes."
        )
    if dict(mesh.shape) != dict(group.mesh.shape):
        raise ValueError(
            f"{operation}: the mesh must be the group's, {dict(group.mesh.shape)}; the "
            f"function runs on {dict(mesh.shape)}."
        )


def check_array(
    operation: str,
    name: str,
    x: Any,
    shape: tuple[int | None, ...],
    letters: str,
    *dtypes: Any,
) -> None:
    """`x` has the shape, None standing for any size, and one of the dtypes."""
    if x is None:
        raise ValueError(f"{operation}: {name} must be an array; got None.")
    fits = x.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, x.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(
            letter if size is None else f"{letter}={size}"
            for letter, size in zip(letters.split(), shape, strict=True)
        )
        raise ValueError(
            f"{operation}: {name} must have the shape [{expected}]; got {x.shape}."
        )
    if x.dtype not in map(np.dtype, dtypes):
        names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(
            f"{operation}: {name} must be {names}; got {x.dtype.name}. "
            "Cast it with .astype()."
        )


def check_input_scale(
    operation: str, token_format: TokenFormat, input_scale: Any
) -> Any:
    """`float32[]` for formats that take an input scale, 1 where none is given."""
    if not token_format.takes_input_scale:
        if input_scale is None:
            return None
        raise ValueError(
            f"{operation}: input_scale is for formats that quantise with a global "
            f"scale, such as NVFP4; {token_format.name} does not."
        )
    if input_scale is None:
        return jnp.ones((), jnp.float32)
    input_scale = jnp.asarray(input_scale)
    if input_scale.size != 1 or input_scale.dtype != jnp.float32:
        raise ValueError(
            f"{operation}: input_scale must be one float32 number; got "
            f"{input_scale.dtype.name}{list(input_scale.shape)}."
        )
    return lax.stop_gradient(input_scale.reshape(()))


def check_input_scales(
    token_format: TokenFormat, input_scales: Any, n_groups: int
) -> Any:
    """`float32[L]` for formats that take input scales, or None."""
    if input_scales is None:
        return None
    if not token_format.takes_input_scale:
        raise ValueError(
            "fused_silu: input_scales are for formats that quantise with a global "
            f"scale, such as NVFP4; {token_format.name} does not."
        )
    input_scales = jnp.asarray(input_scales)
    check_array(
        "fused_silu", "input_scales", input_scales, (n_groups,), "L", jnp.float32
    )
    return input_scales


def check_is_dispatched(operation: str, dispatched: Any) -> None:
    """`dispatched` comes from a dispatch."""
    if not isinstance(dispatched, Dispatched):
        raise TypeError(
            f"{operation}: dispatched must be what dispatch gave; got "
            f"{type(dispatched).__name__}."
        )


def check_dispatched(operation: str, group: EPGroup, dispatched: Any) -> None:
    """`dispatched` comes from a dispatch of this group."""
    check_is_dispatched(operation, dispatched)
    if dispatched.group != group:
        raise ValueError(
            f"{operation}: dispatched must come from this group, {group.key}; it comes "
            f"from {dispatched.group.key}."
        )


def check_in_flight(operation: str, group: EPGroup, in_flight: Any) -> None:
    """`in_flight` comes from the first half of this operation, of this group."""
    if not isinstance(in_flight, InFlight) or in_flight.operation != operation:
        got = type(in_flight).__name__
        if isinstance(in_flight, InFlight):
            got = f"that of {in_flight.operation}_async"
        raise TypeError(
            f"{operation}_wait: in_flight must be what {operation}_async gave; got "
            f"{got}."
        )
    if in_flight.group != group:
        raise ValueError(
            f"{operation}_wait: in_flight must come from this group, {group.key}; it "
            f"comes from {in_flight.group.key}."
        )


def vary_alike(axis_name: str | None, *arrays: Any) -> list[Any]:
    """The arrays, all typed as varying over the same mesh axes, `axis_name` included.

    `jax.shard_map` with `check_vma` wants operands of a primitive to agree; the
    gradient of the conversion is the sum that an unvarying operand needs.
    """
    present = [x for x in arrays if x is not None]
    axes = {axis_name} if axis_name else set()
    axes = axes.union(*(jax.typeof(x).mat.varying for x in present))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [None if x is None else vary(x) for x in arrays]
