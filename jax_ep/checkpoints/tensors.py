"""The tensors of a checkpoint as numbers: parts of them, dequantized, without reading the rest."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep.exchange.checks import is_code
from jax_ep.layer.quantize_weights import SCALE_BLOCK

SCALES, BLOCKS = "_scale_inv", "_blocks"  # end keys of scales in FP8, and of codes in MXFP4
Ranges = tuple[tuple[int, int], ...]  # begin and end along each axis

_MX_BLOCK = 32  # elements of MXFP4 that share a scale
_DTYPES = {"BF16": "bfloat16", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn"}
_DTYPES |= {"F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
_DTYPES |= {f"F{n}": f"float{n}" for n in (16, 32, 64)}
_DTYPES |= {f"I{n}": f"int{n}" for n in (8, 16, 32, 64)}
_DTYPES |= {f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)}


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of safetensors files, mapped into memory: only what is sliced is read.

    Args:
        path: a file, or a folder, whose files `*.safetensors` are one checkpoint.

    Returns:
        Arrays by key, which must not be written to. Numbers of 8 bits are of `ml_dtypes`.

    Raises:
        FileNotFoundError: there is no such file, or none in the folder.
        ValueError: a file is not one of safetensors, or has numbers of a dtype without an
            equivalent in NumPy.
    """
    path = pathlib.Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"The folder must have files *.safetensors; got {path}.")
    tensors = {}
    for file in files:
        data = np.memmap(file, np.uint8, "r").view(np.ndarray)
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        if not 8 < begin <= data.size:
            raise ValueError(f"{file} must be a file of safetensors; its header is damaged.")
        for key, each in json.loads(data[8:begin].tobytes()).items():
            if key == "__metadata__":
                continue
            if each["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{file} must have numbers of a dtype out of {', '.join(_DTYPES)}; got "
                    f"{each['dtype']}."
                )
            first, last = each["data_offsets"]
            values = data[begin + first : begin + last].view(jnp.dtype(_DTYPES[each["dtype"]]))
            tensors[key] = values.reshape(each["shape"])
    return tensors


def read(
    tensors: Mapping[str, Any], key: str, shape: tuple[int, ...], ranges: Ranges, as_codes: bool
) -> np.ndarray:
    """A part of a tensor: codes in FP8 as they are, or numbers, dequantized in float32."""
    if f"{key}{BLOCKS}" in tensors:
        return _read_mxfp4(tensors, key, shape, ranges)
    values = _slice(tensors, key, shape, ranges)
    is_fp8 = values.dtype == jnp.float8_e4m3fn
    if as_codes and not is_fp8:
        raise ValueError(
            f"{key!r} must be float8_e4m3fn, as the layer's experts are codes; got "
            f"{values.dtype.name}. Load the layer first, then call its quantize_experts()."
        )
    if not is_fp8 and (is_code(values.dtype) or not jnp.issubdtype(values.dtype, jnp.floating)):
        raise ValueError(
            f"{key!r} must be floating-point numbers of 16 bits or more, or float8_e4m3fn with "
            f"scales; got {values.dtype.name}."
        )
    return _scale(tensors, key, shape, ranges, values) if is_fp8 and not as_codes else values


def swap(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """With the last two in each other's place."""
    return (*values[:-2], values[-1], values[-2])


def _read_mxfp4(
    tensors: Mapping[str, Any], key: str, shape: tuple[int, ...], ranges: Ranges
) -> np.ndarray:
    """`[..., n_out, n_in]`: a byte has two elements, the even one in its low nibble."""
    *outer, (begin, end) = ranges
    first, half = begin // _MX_BLOCK, _MX_BLOCK // 2
    grid = *shape[:-1], shape[-1] // _MX_BLOCK
    covered = *outer, (first, -(-end // _MX_BLOCK))
    blocks = _slice(tensors, key + BLOCKS, (*grid, half), (*covered, (0, half)))
    scales = _slice(tensors, f"{key}_scales", grid, covered).view(jnp.float8_e8m0fnu)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).view(jnp.float4_e2m1fn)
    values = codes.reshape(*scales.shape, _MX_BLOCK).astype(np.float32)
    values *= scales.astype(np.float32)[..., None]
    skipped = first * _MX_BLOCK
    return values.reshape(*values.shape[:-2], -1)[..., begin - skipped : end - skipped]


def _scale(
    tensors: Mapping[str, Any], key: str, shape: tuple[int, ...], ranges: Ranges, codes: np.ndarray
) -> np.ndarray:
    """Codes `[n_out, n_in]` in FP8, times their scales."""
    grid = tuple(-(-n // SCALE_BLOCK) for n in shape)
    covered = tuple((a // SCALE_BLOCK, -(-b // SCALE_BLOCK)) for a, b in ranges)
    scales = _slice(tensors, key + SCALES, grid, covered).astype(np.float32)
    for axis, (a, b) in enumerate(ranges):
        scales = scales.take(np.arange(a, b) // SCALE_BLOCK - a // SCALE_BLOCK, axis)
    return codes.astype(np.float32) * scales


def _slice(
    tensors: Mapping[str, Any], key: str, shape: tuple[int, ...], ranges: Ranges
) -> np.ndarray:
    if key not in tensors:
        other = next(iter(tensors), None)
        raise ValueError(
            f"tensors must have the key {key!r}; got {len(tensors)} others, such as {other!r}. If "
            "they begin otherwise, change the layout: dataclasses.replace(layout, prefix=...)."
        )
    tensor = tensors[key]
    got = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
    if got != shape:
        raise ValueError(
            f"{key!r} must have the shape {list(shape)}, by the layer's parameters; got "
            f"{list(got)}."
        )
    return np.asarray(tensor[tuple(slice(*each) for each in ranges)])
