"""Calls inside a node that run while the exchange between nodes does, as one custom call each."""

import dataclasses

import jax

from jax_ep import autodiff
from jax_ep.connection import FfiConnection
from jax_ep.formats import QuantizedFormat
from jax_ep.operands import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.transports import between_nodes
from jax_ep.transports.rails import Rails
from jax_ep.xla_ffi.rail import bind_rail_combine, bind_rail_dispatch


def _dispatch(
    rails: Rails, inner: FfiConnection, operands: DispatchOperands, group_ids: jax.Array
) -> DispatchResults:
    """Sends this rank's tokens to the nodes that need them, and dispatches all inside this node.

    Args:
        rails: of the group.
        inner: inside the node.
        operands: of the dispatch inside the node, but with the tokens of this rank, `[T, H]`.
        group_ids: `int32[T, N_c]`, of this rank's choices.
    """
    is_sent = between_nodes.needs(rails.geometry, group_ids)
    handle_shape = inner.handle_shape(operands.group_ids.shape[0])
    return bind_rail_dispatch(inner.geometry, operands, is_sent, handle_shape).named()


dispatch = jax.custom_vjp(_dispatch, nondiff_argnums=(0, 1))


def _dispatch_fwd(
    rails: Rails, inner: FfiConnection, operands: DispatchOperands, group_ids: jax.Array
) -> tuple[DispatchResults, tuple[autodiff.SavedDispatch, jax.Array]]:
    results = _dispatch(rails, inner, operands, group_ids)
    return results, (autodiff.save_dispatch(operands, results), group_ids)


def _dispatch_bwd(
    rails: Rails,
    inner: FfiConnection,
    residuals: tuple[autodiff.SavedDispatch, jax.Array],
    cotangents: DispatchResults,
) -> tuple[DispatchOperands, None]:
    saved, group_ids = residuals
    if isinstance(inner.geometry.config.token_format, QuantizedFormat):
        gradients, *_ = autodiff.dispatch_gradients(inner, saved, cotangents)
        zeros = gradients.tokens[: group_ids.shape[0]]
        return dataclasses.replace(gradients, tokens=zeros), None
    plain_sum = CombineOperands(
        cotangents.tokens, saved.routing, row_scalars=cotangents.row_weights
    )
    tokens, *weights = _call_combine(rails, inner, plain_sum)
    topk_weights = weights[0] if weights else None
    return dataclasses.replace(saved.like, tokens=tokens, topk_weights=topk_weights), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _combine(
    rails: Rails, inner: FfiConnection, operands: CombineOperands, group_ids: jax.Array
) -> jax.Array:
    """Combines inside this node, and adds the sums of all nodes: `[T, H]`.

    Args:
        rails: of the group.
        inner: inside the node.
        operands: of the combine inside the node, but with the residual of this rank, `[T, H]`.
        group_ids: `int32[T, N_c]`, of this rank's choices.
    """
    return _call_combine(rails, inner, operands)[0]


def _call_combine(rails: Rails, inner: FfiConnection, operands: CombineOperands) -> list[jax.Array]:
    """See `bind_rail_combine`."""
    is_sent = (operands.routing.group_ids >= 0).any(axis=1)
    n_nodes = rails.geometry.routed.n_nodes
    return bind_rail_combine(inner.geometry, operands, is_sent, n_nodes)


combine = jax.custom_vjp(_combine, nondiff_argnums=(0, 1))


def _combine_fwd(
    rails: Rails, inner: FfiConnection, operands: CombineOperands, group_ids: jax.Array
) -> tuple[jax.Array, tuple[autodiff.SavedCombine, jax.Array]]:
    result = _combine(rails, inner, operands, group_ids)
    return result, (autodiff.save_combine(operands), group_ids)


def _combine_bwd(
    rails: Rails,
    inner: FfiConnection,
    residuals: tuple[autodiff.SavedCombine, jax.Array],
    cotangent: jax.Array,
) -> tuple[CombineOperands, None]:
    saved, group_ids = residuals
    ids = group_ids, saved.operands.routing.group_ids
    spread = between_nodes.spread_tokens(rails, cotangent, *ids)
    gradients, *_ = autodiff.combine_gradients(inner, saved, spread)
    residual = cotangent if saved.has_residual else None
    return dataclasses.replace(gradients, residual=residual), None


combine.defvjp(_combine_fwd, _combine_bwd)
