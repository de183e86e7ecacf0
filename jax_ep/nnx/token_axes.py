"""Which mesh axes shard which dimensions of a layer's tokens."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import P

from jax_ep.group import EPGroup

Axes = str | tuple[str, ...] | None


def check_token_axes(group: EPGroup, given: Axes | P) -> P:
    """The axes of each dimension before H that is sharded; None in the place of others."""
    own, skip = set(group.geometry.axis_names), group.config.skip_a2a
    if given is None:
        names = group.mesh.axis_names
        return _as_spec([tuple(name for name in names if not (skip and name in own))])
    dimensions = [as_tuple(each) for each in (given if isinstance(given, P) else (given,))]
    axes = tuple(name for each in dimensions for name in each)
    are_axes = are_different_axes(axes, group.mesh.axis_names)
    if not are_axes or not (own.isdisjoint(axes) if skip else own.issubset(axes)):
        which = "none of the group's, because of skip_a2a" if skip else "all of the group's"
        raise ValueError(
            f"token_axes must be different axes of the mesh, {which}; got {axes}, the group has "
            f"{group.geometry.axis_names}, the mesh {group.mesh.axis_names}. If several dimensions "
            "of the tokens are sharded, pass the axes of each, as in jax.P('data', 'expert')."
        )
    return _as_spec(dimensions)


def are_different_axes(axes: tuple[Any, ...], allowed: Sequence[str]) -> bool:
    """Whether axes as given by the user are some of those allowed, each once."""
    return all(name in tuple(allowed) for name in axes) and len(set(axes)) == len(axes)


def axes_of(spec: P) -> tuple[str, ...]:
    """The axes of all dimensions."""
    return tuple(name for each in spec for name in as_tuple(each))


def axes_of_dimension(spec: P, dimension: int) -> tuple[str, ...]:
    """The axes that shard one dimension."""
    return as_tuple(spec[dimension]) if dimension < len(spec) else ()


def spec_of_call(group: EPGroup, spec: P, follows: bool, tokens: jax.Array) -> P:
    """How the tokens of a call are sharded: by `spec`.

    Or with `follows`, on a mesh with explicit axes, as their type says. Requires tokens that fit.
    """
    call = group.geometry.call("nnx.MoE")
    if _is_explicit(group):
        found = _spec_of(tokens)
        if len(found) >= tokens.ndim:
            raise ValueError(
                f"{call}: the last dimension of tokens, H, must not be sharded; they are sharded "
                f"as {found}. Reshard them with jax.reshard."
            )
        own, axes = set(group.geometry.axis_names), set(axes_of(found))
        fits = not own & axes if group.config.skip_a2a else own <= axes
        if follows and fits:
            spec = found
        if found != spec:
            says = f"their axes are explicit and say {found}"
            if follows:
                raise ValueError(
                    f"{call}: tokens must {_describe_axes(group)}; {says}. Reshard them: "
                    f"jax.reshard(tokens, jax.NamedSharding(mesh, jax.{spec}))."
                )
            advice = f", or make the layer with token_axes={found}" if fits else ""
            raise ValueError(
                f"{call}: tokens must be sharded as token_axes says, {spec}; {says}. Reshard them "
                f"with jax.reshard{advice}."
            )
    _check_divides(group, spec, tokens.shape)
    return spec


def _describe_axes(group: EPGroup) -> str:
    """What a layer without `token_axes` requires of explicit axes."""
    own = group.geometry.axis_names
    axes = f"axis {own[0]!r}" if len(own) == 1 else f"axes {own}"
    if group.config.skip_a2a:
        return f"not be sharded over the group's {axes}, because of skip_a2a"
    return f"be sharded over the group's {axes}"


def check_sharded_alike(group: EPGroup, spec: P, mask: jax.Array) -> None:
    """Requires a mask that is sharded as the tokens are."""
    if _is_explicit(group) and _spec_of(mask) != spec:
        raise ValueError(
            f"{group.geometry.call('nnx.MoE')}: mask must be sharded as tokens are, {spec}; its "
            f"axes are explicit and say {_spec_of(mask)}. Reshard it with jax.reshard."
        )


def count_shards(group: EPGroup, axes: tuple[str, ...]) -> int:
    """The shards that axes of the mesh make."""
    return math.prod(group.mesh.shape[name] for name in axes)


def _check_divides(group: EPGroup, spec: P, shape: tuple[int, ...]) -> None:
    """Requires dimensions before H that the shards divide."""
    call = group.geometry.call("nnx.MoE")
    if len(spec) >= len(shape):
        raise ValueError(
            f"{call}: tokens must have the dimensions that token_axes={spec} shards, {len(spec)} "
            f"before H; got {shape}."
        )
    for i, size in enumerate(shape[: len(spec)]):
        axes = axes_of_dimension(spec, i)
        n_shards = count_shards(group, axes)
        if size % n_shards:
            raise ValueError(
                f"{call}: dimension {i} of tokens must be a multiple of {n_shards}, the shards "
                f"along {axes}; got {shape}. Pad the tokens, with a mask that is False for the "
                f"padding{_advise(group, spec, shape)}."
            )


def _advise(group: EPGroup, spec: P, shape: tuple[int, ...]) -> str:
    """Names the axes by dimension, if the first two dimensions together have room for them."""
    axes = axes_of(spec)
    for n in range(len(axes) - 1, 0, -1):
        split = [axes[:n], axes[n:]]
        n_shards = [count_shards(group, each) for each in split]
        if len(shape) > 2 and not any(a % b for a, b in zip(shape[:2], n_shards, strict=True)):
            return (
                ", or if they are sharded over several dimensions, make the layer with the axes of "
                f"each: token_axes={_as_spec(split)} would fit"
            )
    return ""


def _is_explicit(group: EPGroup) -> bool:
    return all(kind == jax.sharding.AxisType.Explicit for kind in group.mesh.axis_types)


def _spec_of(x: jax.Array) -> P:
    return _as_spec([as_tuple(each) for each in jax.typeof(x).sharding.spec])


def _as_spec(dimensions: Sequence[tuple[str, ...]]) -> P:
    """Without empty dimensions at the end; one axis by its name alone."""
    while len(dimensions) > 1 and not dimensions[-1]:
        dimensions = dimensions[:-1]
    return P(*[each[0] if len(each) == 1 else each or None for each in dimensions])


def as_tuple(axes: Any) -> tuple[Any, ...]:
    """One axis, several or none."""
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)
