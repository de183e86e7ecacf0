"""Calls inside a node that run while the exchange between nodes does, as one custom call each."""

import dataclasses

import jax

from jax_ep import autodiff
from jax_ep.connection import FfiConnection
from jax_ep.formats import QuantizedFormat
from jax_ep.operands import DispatchOperands, DispatchResults
from jax_ep.transports import between_nodes
from jax_ep.transports.rails import Rails
from jax_ep.xla_ffi.rail import bind_rail_dispatch


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
    gradients, *_ = autodiff.dispatch_gradients(inner, saved, cotangents)
    if isinstance(inner.geometry.config.token_format, QuantizedFormat):
        tokens = gradients.tokens[: group_ids.shape[0]]  # zeros
    else:
        ids = group_ids, saved.routing.group_ids
        tokens = between_nodes.collect_sums(rails, gradients.tokens, None, *ids)
    return dataclasses.replace(gradients, tokens=tokens), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
