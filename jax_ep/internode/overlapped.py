"""Intra-node calls that run while the inter-node exchange does.

Exchange and call are one operation. Its gradients are made of the other ones: the exchanges of
gradients.py and the intra-node calls.
"""

import dataclasses
from typing import Any

import jax

from jax_ep.formats import QuantizedFormat
from jax_ep.internode.gradients import all_gather_tokens
from jax_ep.internode.rails import OverlappingRails, Rails
from jax_ep.operands.calls import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.transports import gradients as one_node

# Tokens of a rank from which on a dispatch overlaps, and the backward of a combine. Ids and weights
# of a dispatch then travel ahead, which takes 10 us. The same in all processes. Tests lower it.
min_tokens = 1024
# The same of a combine, in which nothing travels ahead.
min_combine_tokens = 512


def overlaps_dispatch(rails: Rails, n_tokens: int) -> OverlappingRails | None:
    """The rails, if a dispatch of so many tokens per rank overlaps with its exchange.

    So does the backward of a combine of as many.
    """
    return rails if isinstance(rails, OverlappingRails) and n_tokens >= min_tokens else None


def overlaps_combine(rails: Rails, n_tokens: int) -> OverlappingRails | None:
    """The same of a combine. Where a dispatch overlaps, its combine does, too."""
    least = min(min_tokens, min_combine_tokens)
    return rails if isinstance(rails, OverlappingRails) and n_tokens >= least else None


def _all_gather_and_dispatch(
    rails: OverlappingRails, operands: DispatchOperands, group_ids: jax.Array
) -> DispatchResults:
    """See `OverlappingRails.dispatch`."""
    return rails.dispatch(operands, group_ids).named()


all_gather_and_dispatch = jax.custom_vjp(_all_gather_and_dispatch, nondiff_argnums=(0,))


def _all_gather_and_dispatch_fwd(rails: OverlappingRails, operands: Any, group_ids: Any) -> Any:
    results = _all_gather_and_dispatch(rails, operands, group_ids)
    return results, (one_node.save_dispatch(operands, results), group_ids)


def _all_gather_and_dispatch_bwd(
    rails: OverlappingRails, residuals: Any, cotangents: DispatchResults
) -> tuple[DispatchOperands, None]:
    saved, group_ids = residuals
    if isinstance(rails.geometry.config.token_format, QuantizedFormat):
        gradients, *_ = one_node.dispatch_gradients(rails.inner, saved, cotangents)
        zeros: Any = None if saved.like.are_encoded else gradients.tokens[: group_ids.shape[0]]
        return dataclasses.replace(gradients, tokens=zeros), None
    plain_sum = CombineOperands(
        cotangents.tokens, saved.routing, row_scalars=cotangents.row_weights
    )
    return saved.like.replace(rails.combine(plain_sum)), None


all_gather_and_dispatch.defvjp(_all_gather_and_dispatch_fwd, _all_gather_and_dispatch_bwd)


def _combine_and_reduce_scatter(
    rails: OverlappingRails, operands: CombineOperands, group_ids: jax.Array
) -> jax.Array:
    """See `OverlappingRails.combine`; `group_ids` are `int32[T, N_c]`, of this rank's choices."""
    return rails.combine(operands)[0]


combine_and_reduce_scatter = jax.custom_vjp(_combine_and_reduce_scatter, nondiff_argnums=(0,))


def _combine_and_reduce_scatter_bwd(
    rails: OverlappingRails, residuals: Any, cotangent: jax.Array
) -> tuple[CombineOperands, None]:
    saved, group_ids = residuals
    operands = saved.operands
    if overlaps_dispatch(rails, group_ids.shape[0]) is None:
        gathered = all_gather_tokens(rails, cotangent, group_ids, operands.routing.group_ids)
        gradients, *_ = one_node.combine_gradients(rails.inner, saved, gathered)
    else:
        grads = rails.combine_grads(operands, cotangent, group_ids)
        gradients = one_node.gradients_of_combine(operands, grads)
    residual = cotangent if saved.has_residual else None
    return dataclasses.replace(gradients, residual=residual), None


combine_and_reduce_scatter.defvjp(
    lambda rails, operands, group_ids: (
        _combine_and_reduce_scatter(rails, operands, group_ids),
        (one_node.save_combine(operands), group_ids),
    ),
    _combine_and_reduce_scatter_bwd,
)
