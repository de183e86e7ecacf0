"""Checks of arguments while JAX traces the public calls."""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.formats import TokenFormat
from jax_ep.geometry import Geometry


def check_manual(operation: str, geometry: Geometry) -> None:
    """Requires the call to be inside a `jax.shard_map` over the group's mesh."""
    operation = geometry.call(operation)
    mesh, names = jax.sharding.get_abstract_mesh(), geometry.axis_names
    if set(names) - set(mesh.manual_axes):
        axes = f"axis {names[0]!r}" if len(names) == 1 else f"axes {names}"
        raise ValueError(
            f"{operation} must be called inside jax.shard_map over the {axes}; manual axes here: "
            f"{tuple(mesh.manual_axes)}. Elsewhere XLA would gather and replicate the operands."
        )
    if set(mesh.manual_axes) != set(mesh.axis_names):
        raise ValueError(
            f"{operation}: all axes of the mesh must be manual; the mesh has "
            f"{tuple(mesh.axis_names)}, manual are {tuple(mesh.manual_axes)}. Leave out "
            "axis_names= of jax.shard_map, or make the call in another jax.shard_map inside, over "
            "the other axes."
        )
    if dict(mesh.shape) != dict(geometry.mesh.shape):
        raise ValueError(
            f"{operation}: the mesh must be the group's, {dict(geometry.mesh.shape)}; the function "
            f"runs on {dict(mesh.shape)}."
        )


# Kinds of dtypes that `check_array` takes in place of a dtype.
_KINDS = {jnp.integer: "integers", jnp.floating: "floating-point numbers"}


def check_array(
    operation: str, name: str, x: Any, shape: tuple[int | None, ...], letters: str, *dtypes: Any
) -> None:
    """Requires a shape, in which None stands for any size, and one of the dtypes.

    `letters` name the last dimensions.
    """
    if x is None:
        raise ValueError(f"{operation}: {name} must be an array; got None.")
    fits = x.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, x.shape, strict=True)
    )
    if not fits:
        named = [*[""] * len(shape), *letters.split()][-len(shape) :]
        expected = ", ".join(
            letter if size is None else f"{letter}={size}" if letter else str(size)
            for letter, size in zip(named, shape, strict=True)
        )
        raise ValueError(f"{operation}: {name} must have the shape [{expected}]; got {x.shape}.")
    is_of = (jnp.issubdtype(x.dtype, t) if t in _KINDS else x.dtype == np.dtype(t) for t in dtypes)
    if not any(is_of):
        names = " or ".join(_KINDS.get(dtype) or np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(
            f"{operation}: {name} must be {names}; got {x.dtype.name}.{advise(x.dtype, *dtypes)}"
        )


def advise(dtype: Any, *wanted: Any) -> str:
    """Advice for an array of the wrong dtype. A cast, only if it keeps the meaning of numbers.

    Ids cast to weights, weights cast to ids, and codes cast to numbers give wrong results.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return " This is a key for random numbers: draw them with jax.random."
    if is_code(dtype):
        return (
            " These seem to be codes of a quantized format, which need their scales: take the "
            "numbers from jax_ep.dequantize(), or from dequantize() of the format."
        )
    if any(each not in _KINDS and is_code(each) for each in wanted):
        return " A cast does not quantize: take codes and scales from quantize() of the format."
    same = (jnp.integer, jnp.floating)
    if any(jnp.issubdtype(dtype, kind) and _has_kind(wanted, kind) for kind in same):
        return " Cast it with .astype()."
    if any(each not in _KINDS and np.dtype(each) == np.bool_ for each in wanted):
        return " Cast it with .astype(bool)."
    if jnp.issubdtype(dtype, jnp.floating) and _has_kind(wanted, jnp.integer):
        return " Are these weights in place of ids?"
    if jnp.issubdtype(dtype, jnp.integer) and _has_kind(wanted, jnp.floating):
        return " Are these ids in place of numbers?"
    return ""


def is_code(dtype: Any) -> bool:
    """Whether numbers of this dtype are probably codes, or scales, of a quantized format."""
    return np.dtype(dtype) == np.uint8 or (
        jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16
    )


def _has_kind(dtypes: Sequence[Any], kind: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for dtype in dtypes)


def check_not_swapped(operation: str, topk_ids: Any, topk_weights: Any) -> None:
    """Requires that ids and weights are not swapped."""
    if topk_ids is None or topk_weights is None:
        return
    is_swapped = jnp.issubdtype(topk_ids.dtype, jnp.floating) and jnp.issubdtype(
        topk_weights.dtype, jnp.integer
    )
    if is_swapped:
        raise ValueError(
            f"{operation}: topk_ids must be integers and topk_weights floating-point numbers; got "
            f"{topk_ids.dtype.name} and {topk_weights.dtype.name}, so they seem to be swapped."
        )


def check_per_token(
    operation: str, name: str, x: Any, leading: Sequence[int], size: int, letter: str, *dtypes: Any
) -> None:
    """Requires `[*leading, size]`: something for each token, whose leading dimensions are given."""
    letters = f"T {letter}" if len(leading) == 1 else letter
    check_array(operation, name, x, (*leading, size), letters, *dtypes)


# Bytes of one access in the kernels. Rows that are narrower than the group's fill such vectors.
VECTOR_BYTES = 16


def row_size(rows: Any, hidden_size: int) -> int:
    """Elements that rows must have: `hidden_size`, or as many as they have if those are fewer."""
    has_rows = rows is not None and rows.ndim > 1
    return min(hidden_size, rows.shape[-1]) if has_rows else hidden_size


def check_narrow_rows(operation: str, name: str, n_elements: int, *n_bytes: int) -> None:
    """Requires whole vectors of rows that have fewer elements than the group's."""
    if n_elements == 0 or any(size % VECTOR_BYTES for size in n_bytes):
        sizes = " and ".join(map(str, dict.fromkeys(n_bytes)))
        raise ValueError(
            f"{operation}: {name} with fewer elements than hidden_size must take a multiple of "
            f"{VECTOR_BYTES} bytes per row; got {n_elements} elements, {sizes} bytes."
        )


def check_capacity(operation: str, geometry: Geometry, recv_capacity: Any) -> int:
    """The rows of a dispatch (C): the given capacity, or the group's if that is None or less."""
    if recv_capacity is None:
        return geometry.max_recv_tokens
    with contextlib.suppress(TypeError):  # the config says what is wrong
        if operator.index(recv_capacity) >= geometry.max_recv_tokens and recv_capacity is not True:
            return geometry.max_recv_tokens
    try:
        config = dataclasses.replace(geometry.config, recv_capacity=recv_capacity)
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from None
    assert config.recv_capacity is not None
    return config.recv_capacity


def as_int32(ids: Any) -> jax.Array:
    """Integers of any dtype; those beyond int32 become its limits, which are no expert's id."""
    if ids.dtype == jnp.int32:
        return ids
    module: Any = np if isinstance(ids, np.ndarray) else jnp
    given, limits = jnp.iinfo(ids.dtype), np.iinfo(np.int32)
    if given.min < limits.min:
        ids = module.maximum(ids, ids.dtype.type(limits.min))
    if given.max > limits.max:
        ids = module.minimum(ids, ids.dtype.type(limits.max))
    return jnp.asarray(ids.astype(np.int32))


def as_float32(weights: Any) -> jax.Array:
    """Floating-point numbers of any dtype; gradients come back in it."""
    return weights if weights.dtype == jnp.float32 else jnp.asarray(weights.astype(np.float32))


def check_input_scale(operation: str, token_format: TokenFormat, input_scale: Any) -> Any:
    """`float32[]` for formats with a global scale, 1 by default; None for others."""
    if not _takes_input_scale(operation, "input_scale", token_format, input_scale):
        return None
    if input_scale is None:
        return jnp.ones((), jnp.float32)
    (input_scale,) = as_arrays(operation, input_scale=input_scale)
    if input_scale.size != 1 or input_scale.dtype != jnp.float32:
        raise ValueError(
            f"{operation}: input_scale must be one float32 number; got "
            f"{input_scale.dtype.name}{list(input_scale.shape)}."
        )
    return lax.stop_gradient(input_scale.reshape(()))


def check_input_scales(
    operation: str, token_format: TokenFormat, input_scales: Any, n_groups: int
) -> Any:
    """`float32[L]`, one per group of rows, or None."""
    _takes_input_scale(operation, "input_scales", token_format, input_scales)
    if input_scales is None:
        return None
    (input_scales,) = as_arrays(operation, input_scales=input_scales)
    check_array(operation, "input_scales", input_scales, (n_groups,), "L", jnp.float32)
    return input_scales


def _takes_input_scale(operation: str, name: str, token_format: TokenFormat, value: Any) -> bool:
    if value is not None and not token_format.takes_input_scale:
        raise ValueError(
            f"{operation}: {name} is for formats that quantize with a global scale, such as NVFP4; "
            f"{token_format.name} does not."
        )
    return token_format.takes_input_scale


def is_finite(value: Any) -> bool:
    """Whether an argument is a finite Python or NumPy number."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    return is_number and not isinstance(value, bool) and math.isfinite(value)


def as_arrays(operation: str, **arrays: Any) -> list[Any]:
    """JAX arrays; None and 64-bit NumPy arrays stay as they are, for `check_array` to reject.

    Python integers beyond 32 bits become such a NumPy array.
    """

    def convert(name: str, x: Any) -> Any:
        if x is None or (isinstance(x, np.ndarray | np.generic) and x.dtype.itemsize == 8):
            return x
        try:
            if isinstance(x, str | bytes):
                raise TypeError
            return jnp.asarray(x)
        except OverflowError:
            return np.asarray(x)
        except (TypeError, ValueError):
            raise TypeError(
                f"{operation}: {name} must be an array of numbers; got {type(x).__name__}."
            ) from None

    return [convert(name, x) for name, x in arrays.items()]


def check_flags(operation: str, **flags: Any) -> list[bool]:
    """Requires True or False, of Python or NumPy; returns them as Python's."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            where = f"{operation}: " if operation else ""
            raise ValueError(f"{where}{name} must be True or False; got {value!r}.")
    return [bool(value) for value in flags.values()]


def as_values(operation: str, name: str, x: Any, advice: str) -> np.ndarray:
    """A NumPy array; requires values that are known, not traced."""
    try:  # explicitly: no `jax.transfer_guard("disallow")` stops it
        return np.asarray(jax.device_get(x) if isinstance(x, jax.Array) else x)
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            f"{operation}: {name} must have values; got a traced array. {advice}"
        ) from None


def vary_alike(axis_names: Sequence[str], *trees: Any) -> Any:
    """Types all arrays of pytrees as varying over the same mesh axes, `axis_names` among them.

    `jax.shard_map` with `check_vma` requires the operands of a primitive to agree. The gradient of
    the conversion is the sum that an unvarying operand needs.
    """
    leaves = jax.tree.leaves(trees)
    axes = set(axis_names).union(*(jax.typeof(x).mat.varying for x in leaves))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees)
