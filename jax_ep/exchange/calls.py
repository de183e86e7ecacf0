"""The primitives behind `host` and `p2p`: how they are bound, typed and lowered."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jax_ep.exchange.checks import vary_alike
from jax_ep.exchange.operands import CombineOperands, DispatchOperands, DispatchResults, Weighting
from jax_ep.ffi.lowering import call_primitive, host_call, like, make_primitive
from jax_ep.formats import TokenFormat
from jax_ep.formats.bits import from_bytes, to_bytes
from jax_ep.geometry import Geometry

# Operands and parameters of a primitive.
Call = tuple[list[jax.Array], dict[str, Any]]


def bind_dispatch(
    geometry: Geometry, operands: DispatchOperands, handle_shape: tuple[int, ...]
) -> DispatchResults:
    """The custom call of dispatch."""
    arrays, params = dispatch_call(geometry, operands, handle_shape)
    return DispatchResults.of(dispatch_p.bind(*arrays, **params), params["has_weights"])


def dispatch_call(
    geometry: Geometry, operands: DispatchOperands, handle_shape: tuple[int, ...]
) -> Call:
    """Operands and parameters of `dispatch_p`."""
    token_format = operands.token_format
    takes_scale = token_format.takes_input_scale and not operands.are_encoded
    scale = operands.input_scale if takes_scale else None
    optional = present(operands.topk_weights, scale)
    arrays = [coordinate(geometry), operands.tokens, operands.group_ids, *optional]
    params = dict(
        geometry=geometry,
        token_format=token_format,
        row_elements=operands.row_elements,
        handle_shape=handle_shape,
        max_recv_tokens=operands.max_recv_tokens,
        has_weights=operands.topk_weights is not None,
    )
    return arrays, params


def bind_combine(
    geometry: Geometry, operands: CombineOperands, primitive: Primitive | None = None
) -> list[jax.Array]:
    """The custom call of combine: `combine_p`, or `primitive` with its operands.

    The second result, if there are `row_scalars`, is `float32[T, N]`: those of the choices.
    """
    arrays, params = combine_call(geometry, operands)
    return (primitive or combine_p).bind(*arrays, **params)


def combine_call(geometry: Geometry, operands: CombineOperands) -> Call:
    """Operands and parameters of `combine_p`."""
    routing, scalars = operands.routing, operands.row_scalars
    optional = present(operands.weights, scalars, operands.residual)
    arrays = [operands.expert_out, routing.group_ids, routing.handle, *optional]
    params = _combine_params(geometry, operands) | dict(has_scalars=scalars is not None)
    return [coordinate(geometry), *arrays], params


def combine_grad_call(geometry: Geometry, operands: CombineOperands, cotangent: jax.Array) -> Call:
    """Operands and parameters of `combine_grad_p`, the gradients of `expert_out` and weights.

    Without weights, `expert_out` is not read, and may be None.
    """
    routing, weights = operands.routing, operands.weights
    arrays = [cotangent, routing.row_offsets, routing.src_info, routing.group_ids, routing.handle]
    if weights is not None:
        arrays += [operands.expert_out, weights]
    return [coordinate(geometry), *arrays], _combine_params(geometry, operands)


def exchange_bytes(geometry: Geometry, x: jax.Array, *, splits: bool) -> jax.Array:
    """`[R, ...]`: of every rank its `x`, or if it `splits` its part `x[rank]` for this rank.

    Bit by bit, without gradients; on CPUs only.
    """
    shape = x.shape[1:] if splits else x.shape
    data = to_bytes(lax.stop_gradient(x))
    n_bytes = math.prod(shape) * x.dtype.itemsize
    data = data.reshape((geometry.n_ranks, n_bytes) if splits else n_bytes)
    (data,) = vary_alike(geometry.axis_names, data)
    (received,) = exchange_p.bind(coordinate(geometry), data, geometry=geometry, splits=splits)
    width = () if x.dtype.itemsize == 1 else (x.dtype.itemsize,)
    return from_bytes(received.reshape(geometry.n_ranks, *shape, *width), x.dtype)


def _combine_params(geometry: Geometry, operands: CombineOperands) -> dict[str, Any]:
    return dict(
        geometry=geometry,
        weighting=operands.weighting,
        reduce=operands.reduce,
        adds_shared_expert=operands.adds_shared_expert,
    )


def coordinate(geometry: Geometry) -> jax.Array:
    """`int32[]`, this device's coordinate in the program's mesh: replica * R + rank.

    The handler compares it with the device's coordinate in the group.
    """
    others = tuple(name for name in geometry.mesh.axis_names if name not in geometry.axis_names)
    rank = lax.axis_index(geometry.axis_name)
    return lax.axis_index(others) * geometry.n_ranks + rank if others else rank


def present(*optional: jax.Array | None) -> list[jax.Array]:
    """The arguments that are not None."""
    return [x for x in optional if x is not None]


def dispatch_attributes(geometry: Geometry, token_format: TokenFormat, **_: Any) -> dict[str, Any]:
    """The attributes that the handler of a dispatch reads."""
    layout = token_format.layout.name
    return dict(group=geometry.key, token_format=token_format.name, scales_layout=layout)


def combine_attributes(
    geometry: Geometry, weighting: Weighting, reduce: bool, adds_shared_expert: bool, **_: Any
) -> dict[str, Any]:
    """The attributes that the handler of a combine, or of its gradient, reads."""
    return dict(
        group=geometry.key,
        weighting=np.int32(weighting),
        reduce=np.bool_(reduce),
        adds_shared_expert=np.bool_(adds_shared_expert),
    )


def exchange_attributes(geometry: Geometry, splits: bool) -> dict[str, Any]:
    """The attributes that the handler of an exchange reads."""
    return dict(group=geometry.key, splits=np.bool_(splits))


def dispatch_types(
    coordinate: Any,
    tokens: Any,
    *_: Any,
    geometry: Geometry,
    token_format: TokenFormat,
    row_elements: int,
    handle_shape: tuple[int, ...],
    max_recv_tokens: int,
    has_weights: bool,
) -> list[Any]:
    """Types of the results of a dispatch."""
    n_rows, hidden_size = max_recv_tokens, row_elements
    n_groups = geometry.routed.n_local_groups
    types = [
        ((n_rows, token_format.row_size(hidden_size)), token_format.row_dtype),
        ((n_groups + 1,), jnp.uint32),  # row_offsets
        ((n_rows, 2), jnp.int32),  # src_info
        ((), jnp.int32),  # n_dropped
        ((), jnp.int32),  # n_invalid
        (handle_shape, jnp.int32),  # handle
    ]
    if has_weights:
        types.append(((n_rows,), jnp.float32))  # row_weights
    if token_format.scale_dtype is not None:
        n_scales = token_format.n_scales(hidden_size)
        n_padded = geometry.routed.n_padded_groups
        shape = token_format.layout.shape(n_rows, n_scales, n_padded)
        types.append((shape, token_format.scale_dtype))  # scales
    return [like(tokens, shape, dtype) for shape, dtype in types]


def combine_types(
    _: Any, expert_out: Any, group_ids: Any, *__: Any, reduce: bool, has_scalars: bool, **___: Any
) -> list[Any]:
    """Types of the results of a combine."""
    leading = group_ids.shape[:1] if reduce else group_ids.shape
    types = [like(expert_out, (*leading, expert_out.shape[1]), expert_out.dtype)]
    return [*types, like(expert_out, group_ids.shape, jnp.float32)] if has_scalars else types


def combine_grad_types(*operands: Any, **_: Any) -> list[Any]:
    """Types of the gradients."""
    _coordinate, cotangent, _offsets, src_info, _ids, _handle, *weighted = operands
    shape = src_info.shape[0], cotangent.shape[-1]
    types = [like(cotangent, shape, cotangent.dtype)]
    return [*types, *(like(cotangent, x.shape, x.dtype) for x in weighted[1:])]


def exchange_types(_: Any, sent: Any, *, geometry: Geometry, **__: Any) -> list[Any]:
    """Type of what is received: bytes of every rank."""
    return [like(sent, (geometry.n_ranks, sent.shape[-1]), sent.dtype)]


dispatch_p = call_primitive("jax_ep_dispatch", dispatch_attributes, dispatch_types)
combine_p = call_primitive("jax_ep_combine", combine_attributes, combine_types)
combine_grad_p = call_primitive("jax_ep_combine_grad", combine_attributes, combine_grad_types)
exchange_p = make_primitive(
    "jax_ep_exchange", cpu=host_call("jax_ep_exchange", exchange_attributes)
)
exchange_p.def_abstract_eval(exchange_types)
