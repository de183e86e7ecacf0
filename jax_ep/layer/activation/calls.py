"""The primitives behind `fused_silu` and its gradient.

They belong to no group and work inside and outside `jax.shard_map`. The activation is C++ on CPUs
and CUDA on GPUs, its gradient CUDA for bfloat16; `jnp` computes the rest.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_ep.ffi import extension
from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.formats import QuantizedFormat, TokenFormat
from jax_ep.formats.scales import group_of

_TARGET = "jax_ep_fused_silu"
_GRADIENT_TARGET = "jax_ep_fused_silu_grad"
_LANE_ELEMENTS = 8  # columns that a thread of the gradient's kernel takes


@dataclasses.dataclass(frozen=True)
class Activation:
    """The parameters of `fused_silu`, and the format of its result."""

    token_format: TokenFormat
    interleaved: bool  # whether gate and up columns alternate
    clamp: tuple[float, float] | None  # (alpha, limit)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """`float32[C, F]` of `x`, `[C, 2 F]`: the kernels' result, up to rounding."""
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


def gate_attributes(activation: Activation) -> dict[str, Any]:
    """The attributes of a custom call that say what it computes, without the format."""
    alpha, limit = activation.clamp or (0.0, 0.0)
    return dict(
        interleaved=np.bool_(activation.interleaved),
        clamped=np.bool_(activation.clamp is not None),
        alpha=np.float32(alpha),
        limit=np.float32(limit),
    )


def _by_jnp(
    x: jax.Array, row_offsets: jax.Array, *input_scales: jax.Array, activation: Activation
) -> list[jax.Array]:
    token_format = activation.token_format
    values = activate(x, activation)
    if not isinstance(token_format, QuantizedFormat):
        return [values.astype(token_format.row_dtype)]
    by_row = None
    if input_scales:
        by_row = input_scales[0][group_of(row_offsets.astype(jnp.int32), x.shape[0])]
    codes, scales = token_format.quantize(values, by_row)
    return [codes, token_format.layout.place(scales, row_offsets)]


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation, is_cuda: bool
) -> Any:
    """The custom call; `jnp` if the extension was not built."""
    try:
        extension.register_cuda() if is_cuda else extension.register_host()
    except ImportError:
        return _lower_jnp(ctx, *operands, activation=activation)
    results = custom_call(_TARGET)(
        ctx,
        *operands,
        token_format=activation.token_format.name,
        scales_layout=activation.token_format.layout.name,
        **gate_attributes(activation),
    )
    return fusion_barrier(results) if is_cuda else results


_lower_jnp = mlir.lower_fun(_by_jnp, multiple_results=True)
fused_silu_p = make_primitive(
    _TARGET,
    cpu=functools.partial(_lower, is_cuda=False),
    cuda=functools.partial(_lower, is_cuda=True),
)
mlir.register_lowering(fused_silu_p, _lower_jnp)


@fused_silu_p.def_abstract_eval
def _result_types(x: Any, row_offsets: Any, *_: Any, activation: Activation) -> Any:
    token_format = activation.token_format
    n_rows, row_size = x.shape[0], cast(int, x.shape[1]) // 2
    shape: tuple[int, ...] = (n_rows, token_format.row_size(row_size))
    types = [like(x, shape, token_format.row_dtype)]
    if token_format.scale_dtype is not None:
        n_groups, n_scales = row_offsets.shape[0] - 1, token_format.n_scales(row_size)
        shape = token_format.layout.shape(n_rows, n_scales, n_groups)
        types.append(like(x, shape, token_format.scale_dtype))
    return types


def gradient_by_jnp(
    x: jax.Array, row_offsets: jax.Array, cotangent: jax.Array, *, activation: Activation
) -> list[jax.Array]:
    """The gradient of `x`, up to rounding."""
    in_use = jnp.arange(x.shape[0], dtype=jnp.uint32) < row_offsets[-1]
    # Both are masked: unused rows may be NaN, and NaN * 0 is NaN.
    x, cotangent = (
        jnp.where(in_use[:, None], each, jnp.zeros((), each.dtype)) for each in (x, cotangent)
    )
    _, pull = jax.vjp(lambda x: activate(x, activation), x)
    return list(pull(cotangent.astype(jnp.float32)))


def _lower_gradient_cuda(
    ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation
) -> Any:
    types: Any = ctx.avals_in
    x, _, cotangent = types
    if not (x.dtype == cotangent.dtype == jnp.bfloat16) or cotangent.shape[1] % _LANE_ELEMENTS:
        return _lower_gradient_jnp(ctx, *operands, activation=activation)
    try:
        extension.register_cuda()
    except ImportError:
        return _lower_gradient_jnp(ctx, *operands, activation=activation)
    return fusion_barrier(
        custom_call(_GRADIENT_TARGET)(ctx, *operands, **gate_attributes(activation))
    )


_lower_gradient_jnp = mlir.lower_fun(gradient_by_jnp, multiple_results=True)
fused_silu_grad_p = make_primitive(_GRADIENT_TARGET, cuda=_lower_gradient_cuda)
mlir.register_lowering(fused_silu_grad_p, _lower_gradient_jnp)


@fused_silu_grad_p.def_abstract_eval
def _gradient_types(x: Any, row_offsets: Any, cotangent: Any, *, activation: Activation) -> Any:
    return [like(x, x.shape, x.dtype)]
