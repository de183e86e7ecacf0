"""Checks of what pickles hold: frozen dataclasses, and the arguments of a group."""

import dataclasses
from typing import Any

import jax
import numpy as np


class CheckedDataclass:
    """A base of frozen dataclasses whose unpickled fields go through `__post_init__`.

    Without it, unpickling and copying would set the fields as they are. Fields that a pickle of an
    earlier version lacks get their defaults.
    """

    def __setstate__(self, state: Any) -> None:
        """Initializes the object again, with the fields of the pickle."""
        name = type(self).__name__
        if not isinstance(state, dict):
            raise TypeError(
                f"A pickled {name} must hold a dict of its fields; got {type(state).__name__}."
            )
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        unknown = [key for key in state if key not in {each.name for each in fields}]
        if unknown:
            raise ValueError(
                f"A pickled {name} has a field {unknown[0]!r}, which this version of jax_ep does "
                "not know. Make the object again."
            )
        nothing = dataclasses.MISSING
        for each in fields:
            has_default = each.default is not nothing or each.default_factory is not nothing
            if each.name not in state and not has_default:
                raise ValueError(f"A pickled {name} lacks the field {each.name!r}.")
        self.__init__(**state)  # type: ignore[misc]


def check_fields(name: str, value: Any) -> None:
    """Raises ValueError if a dataclass has no fields: a damaged pickle that set none."""
    missing = [each.name for each in dataclasses.fields(value) if each.name not in vars(value)]
    if missing:
        raise ValueError(
            f"{name} must have a field {missing[0]!r}; this {type(value).__name__} has none. Was "
            "it unpickled from damaged data?"
        )


def find_mesh(platform: Any, ids: Any, axes: Any) -> jax.sharding.Mesh:
    """The mesh of a pickled group, on this program's devices.

    From the devices' platform; their ids, in mesh order; (shape, axis names, axis types). Raises
    TypeError if one is of a wrong type, ValueError if they make no mesh that this program has.
    """
    if not isinstance(platform, str):
        raise TypeError(f"A pickled EPGroup's platform must be a str; got {platform!r}.")
    _check_integers("ids", ids)
    shape, names, types = check_tuple("axes", axes, 3)
    _check_integers("axes", shape)
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"A pickled EPGroup's axes must have names; got {names!r}.")
    if not ids or len(set(ids)) < len(ids) or np.prod(shape) != len(ids):
        raise ValueError(
            "A pickled EPGroup's ids must be those of the mesh's devices, each once; got the ids "
            f"{ids}, the shape {shape}."
        )
    by_id = {device.id: device for device in _devices_of(platform, ids)}
    missing = [each for each in ids if each not in by_id]
    if missing:
        raise ValueError(
            f"A pickled EPGroup needs the {platform} devices {ids} of its mesh; this program has "
            f"no device {missing[0]}. Unpickle it where JAX has these devices, or make a group for "
            "this machine's with ep_init."
        )
    devices = np.array([by_id[each] for each in ids]).reshape(shape)
    try:
        return jax.sharding.Mesh(devices, names, axis_types=types)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"A pickled EPGroup's axes must be those of a mesh: {error}") from None


def check_tuple(name: str, value: Any, length: int) -> Any:
    """Requires a tuple in a pickled group."""
    if not isinstance(value, tuple) or len(value) != length:
        raise TypeError(
            f"A pickled EPGroup's {name} must be a tuple of {length}; got {type(value).__name__}."
        )
    return value


def _check_integers(name: str, values: Any) -> None:
    is_list = isinstance(values, list | tuple)
    if not is_list or any(type(each) is not int or each < 0 for each in values):
        raise TypeError(f"A pickled EPGroup's {name} must be integers from 0 on; got {values!r}.")


def _devices_of(platform: str, ids: list[int]) -> list[jax.Device]:
    """The devices of a platform; raises ValueError if JAX has no such platform."""
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        here = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ValueError(
            f"A pickled EPGroup needs the {platform} devices {ids} of its mesh; this program has "
            f"devices of {here} only. Unpickle it where JAX has the platform {platform}, or make a "
            "group for this machine's devices with ep_init."
        ) from error
