"""The primitive behind `fused_silu`: C++ on CPUs, CUDA on GPUs, `jnp` elsewhere.

It belongs to no group, and works inside and outside of `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import _cuda_ffi, _host_ffi
from jax_ep.formats import QuantizedFormat, TokenFormat
from jax_ep.formats.scales import group_of
from jax_ep.primitives import run_eagerly, settled

_TARGET = "jax_ep_fused_silu"


@dataclasses.dataclass(frozen=True)
class Activation:
    """What is computed, and in which format it is given.

    Attributes:
        token_format: of the result.
        interleaved: gate and up take turns.
        clamp: `(alpha, limit)`, or None.
    """

    token_format: TokenFormat
    interleaved: bool
    clamp: tuple[float, float] | None


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """`float32[C, F]` of `x`, `[C, 2 F]`: as the kernels, but for the last bits."""
    x = x.astype(jnp.float32)
    if activation.interleaved:
        gate, up = x[:, 0::2], x[:, 1::2]
    else:
        gate, up = jnp.split(x, 2, axis=1)
    if activation.clamp is None:
        return jax.nn.silu(gate) * up
    alpha, limit = activation.clamp
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


def _by_jnp(
    x: jax.Array,
    row_offsets: jax.Array,
    *input_scales: jax.Array,
    activation: Activation,
) -> list[jax.Array]:
    token_format = activation.token_format
    values = activate(x, activation)
    if not isinstance(token_format, QuantizedFormat):
        return [values.astype(token_format.row_dtype)]
    by_row = None
    if input_scales:
        row = lax.iota(jnp.int32, x.shape[0])
        by_row = input_scales[0][group_of(row_offsets.astype(jnp.int32), row)]
    codes, scales = token_format.quantize(values, by_row)
    return [codes, token_format.layout.place(scales, row_offsets)]


def _result_types(x: Any, row_offsets: Any, *_: Any, activation: Activation) -> Any:
    token_format = activation.token_format
    n_rows, row_size = x.shape[0], x.shape[1] // 2
    rows = (n_rows, token_format.row_size(row_size))
    types: list[tuple[tuple[int, ...], np.dtype]] = [(rows, token_format.row_dtype)]
    if token_format.scale_dtype is not None:
        n_groups, n_scales = row_offsets.shape[0] - 1, token_format.n_scales(row_size)
        shape = token_format.layout.shape(n_rows, n_scales, n_groups)
        types.append((shape, token_format.scale_dtype))
    return [
        x.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
        for shape, dtype in types
    ]


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    activation: Activation,
    extension: ModuleType,
) -> Any:
    """The custom call; `jnp` where the extension is not there."""
    try:
        extension.register()
    except ImportError:
        return _lower_jnp(ctx, *operands, activation=activation)
    row_size = cast(Any, ctx.avals_in[0]).shape[1] // 2
    alpha, limit = activation.clamp or (0.0, 0.0)
    results = jax.ffi.ffi_lowering(_TARGET)(
        ctx,
        *operands,
        token_format=activation.token_format.name,
        scales_layout=activation.token_format.layout.name,
        n_scales=np.int64(activation.token_format.n_scales(row_size)),
        is_interleaved=np.bool_(activation.interleaved),
        is_clamped=np.bool_(activation.clamp is not None),
        alpha=np.float32(alpha),
        limit=np.float32(limit),
    )
    return settled(results) if extension is _cuda_ffi else results


def _batch(
    operands: tuple[jax.Array, ...],
    dims: tuple[int | None, ...],
    *,
    activation: Activation,
) -> Any:
    """One call after the other."""
    size = next(
        x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None
    )
    moved = [
        jnp.broadcast_to(x, (size, *x.shape))
        if dim is None
        else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    results = lax.map(lambda x: fused_silu_p.bind(*x, activation=activation), moved)
    return results, [0] * len(results)


fused_silu_p = Primitive(_TARGET)
fused_silu_p.multiple_results = True
fused_silu_p.def_abstract_eval(_result_types)
fused_silu_p.def_impl(functools.partial(run_eagerly, fused_silu_p))
_lower_jnp = mlir.lower_fun(_by_jnp, multiple_results=True)
mlir.register_lowering(fused_silu_p, _lower_jnp)
for _platform, _extension in (("cpu", _host_ffi), ("cuda", _cuda_ffi)):
    mlir.register_lowering(
        fused_silu_p,
        functools.partial(_lower, extension=_extension),
        platform=_platform,
    )
batching.primitive_batchers[fused_silu_p] = _batch
