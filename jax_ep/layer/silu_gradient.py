"""`fused_silu` with its gradient, whose primitive is CUDA for bfloat16 and `jnp` elsewhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_ep.ffi import extension
from jax_ep.ffi.lowering import custom_call, fusion_barrier, like, make_primitive
from jax_ep.layer.activation import Activation, activate, fused_silu_p, gate_attributes

_TARGET = "jax_ep_fused_silu_grad"
_LANE_ELEMENTS = 8  # columns that a thread of the kernel takes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate_rows(activation: Activation, x: jax.Array, row_offsets: jax.Array) -> jax.Array:
    """The activation in a format that does not quantize."""
    return fused_silu_p.bind(x, row_offsets, activation=activation)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pull_back(
    activation: Activation, x: jax.Array, row_offsets: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """The gradient of `x`, `[C, 2 F]`; zero in rows that are not in use, which may hold NaN."""
    return fused_silu_grad_p.bind(x, row_offsets, cotangent, activation=activation)[0]


def _pull_back_fwd(
    activation: Activation, x: jax.Array, row_offsets: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, Any]:
    def by_jnp(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return _by_jnp(x, row_offsets, cotangent, activation=activation)[0]

    gradient = pull_back(activation, x, row_offsets, cotangent)
    return gradient, jax.vjp(by_jnp, x, cotangent)[1]


def _pull_back_bwd(activation: Activation, pull: Any, of_gradient: jax.Array) -> Any:
    of_x, of_cotangent = pull(of_gradient)
    return of_x, None, of_cotangent


pull_back.defvjp(_pull_back_fwd, _pull_back_bwd)
activate_rows.defvjp(
    lambda activation, *args: (activate_rows(activation, *args), args),
    lambda activation, saved, cotangent: (pull_back(activation, *saved, cotangent), None),
)


def differentiate_as_activation(primitive: Primitive) -> None:
    """For a primitive whose operands are hidden rows first and `row_offsets` last, with one result.

    The activation of the former, which passes the gradient to them alone.
    """

    def jvp(primals: Any, tangents: Any, *, activation: Activation) -> Any:
        hidden, *_, row_offsets = primals
        of_hidden = tangents[0]
        results = primitive.bind(*primals, activation=activation)
        if type(of_hidden) is ad.Zero:
            return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

        def activate(hidden: jax.Array) -> jax.Array:
            return activate_rows(activation, hidden, row_offsets)

        return results, [jax.jvp(activate, (hidden,), (of_hidden,))[1]]

    ad.primitive_jvps[primitive] = jvp


differentiate_as_activation(fused_silu_p)  # bare where a checkpoint recomputes known values


def _by_jnp(
    x: jax.Array, row_offsets: jax.Array, cotangent: jax.Array, *, activation: Activation
) -> list[jax.Array]:
    in_use = jnp.arange(x.shape[0], dtype=jnp.uint32) < row_offsets[-1]
    # Both are masked: unused rows may be NaN, and NaN * 0 is NaN.
    x, cotangent = (
        jnp.where(in_use[:, None], each, jnp.zeros((), each.dtype)) for each in (x, cotangent)
    )
    _, pull = jax.vjp(lambda x: activate(x, activation), x)
    return list(pull(cotangent.astype(jnp.float32)))


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, activation: Activation) -> Any:
    types: Any = ctx.avals_in
    x, _, cotangent = types
    if not (x.dtype == cotangent.dtype == jnp.bfloat16) or cotangent.shape[1] % _LANE_ELEMENTS:
        return _lower_jnp(ctx, *operands, activation=activation)
    try:
        extension.register_cuda()
    except ImportError:
        return _lower_jnp(ctx, *operands, activation=activation)
    return fusion_barrier(custom_call(_TARGET)(ctx, *operands, **gate_attributes(activation)))


_lower_jnp = mlir.lower_fun(_by_jnp, multiple_results=True)
fused_silu_grad_p = make_primitive(_TARGET, cuda=_lower_cuda)
mlir.register_lowering(fused_silu_grad_p, _lower_jnp)


@fused_silu_grad_p.def_abstract_eval
def _result_types(x: Any, row_offsets: Any, cotangent: Any, *, activation: Activation) -> Any:
    return [like(x, x.shape, x.dtype)]
