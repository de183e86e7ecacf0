"""Intra-node calls that run while the inter-node exchange does.

Exchange and call are one operation. Its gradients are made of the other ones: the exchanges of
rules.py and the intra-node calls.
"""

import dataclasses
from typing import Any

import jax

from jax_ep.exchange import rules as one_node
from jax_ep.exchange.async_calls import InFlightCombine, InFlightDispatch, finish
from jax_ep.exchange.operands import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.exchange.overlap import CotangentSlots
from jax_ep.nodes.rails import OverlappingRails, Rails
from jax_ep.nodes.rules import all_gather_tokens

# Tokens of a rank from which on a dispatch overlaps, and the backward of a combine. Ids and weights
# of a dispatch then travel ahead, which takes 10 us. The same in all processes. Tests lower it.
min_tokens = 1024
# For a combine, in which nothing travels ahead.
min_combine_tokens = 512


def rails_beside_dispatch(rails: Rails, n_tokens: int) -> OverlappingRails | None:
    """The rails, if a dispatch of so many tokens per rank overlaps with its exchange.

    So does the backward of a combine of as many.
    """
    return rails if isinstance(rails, OverlappingRails) and n_tokens >= min_tokens else None


def rails_beside_combine(rails: Rails, operands: CombineOperands) -> OverlappingRails | None:
    """The rails, if a combine overlaps with its exchange; without a sum, none does.

    Where a dispatch overlaps, so does its combine.
    """
    if not isinstance(rails, OverlappingRails) or not operands.reduce:
        return None
    least = min(min_tokens, min_combine_tokens)
    return rails if operands.routing.group_ids.shape[0] >= least else None


def _all_gather_and_dispatch(
    rails: OverlappingRails,
    operands: DispatchOperands,
    group_ids: jax.Array,
    results: tuple[jax.Array, ...] | None = None,
    slots: CotangentSlots | None = None,
) -> DispatchResults:
    """`OverlappingRails.dispatch`; with `results`, a completed one."""
    if results is None:
        return rails.dispatch(operands, group_ids).named()
    return one_node.finished_dispatch(operands, results).named()


all_gather_and_dispatch = jax.custom_vjp(_all_gather_and_dispatch, nondiff_argnums=(0,))


def _all_gather_and_dispatch_fwd(
    rails: OverlappingRails, operands: Any, group_ids: Any, results: Any, slots: Any
) -> Any:
    named = _all_gather_and_dispatch(rails, operands, group_ids, results)
    return named, (one_node.save_dispatch(operands, named, slots), group_ids)


def _all_gather_and_dispatch_bwd(
    rails: OverlappingRails, residuals: Any, cotangents: DispatchResults
) -> tuple[DispatchOperands, None, None, CotangentSlots | None]:
    saved, group_ids = residuals
    if not rails.geometry.config.token_format.returns_gradient:
        gradients, *_ = one_node.dispatch_gradients(rails.inner, saved, cotangents)
        zeros: Any = None if saved.like.are_encoded else gradients.tokens[: group_ids.shape[0]]
        return dataclasses.replace(gradients, tokens=zeros), None, None, None
    plain_sum = CombineOperands(
        cotangents.tokens, saved.routing, row_scalars=cotangents.row_weights
    )
    grads, slots = rails.dispatch_grads(plain_sum, saved.slots)
    return saved.like.replace(grads), None, None, slots


all_gather_and_dispatch.defvjp(_all_gather_and_dispatch_fwd, _all_gather_and_dispatch_bwd)


def _combine_and_reduce_scatter(
    rails: OverlappingRails,
    operands: CombineOperands,
    group_ids: jax.Array,
    result: jax.Array | None = None,
    slots: CotangentSlots | None = None,
) -> jax.Array:
    """`OverlappingRails.combine`; `group_ids` are `int32[T, N_c]`, of this rank's choices.

    With `result`, a completed one.
    """
    if result is None:
        return rails.combine(operands)
    return one_node.finished_combine(operands, result)


combine_and_reduce_scatter = jax.custom_vjp(_combine_and_reduce_scatter, nondiff_argnums=(0,))


def _combine_and_reduce_scatter_bwd(
    rails: OverlappingRails, residuals: Any, cotangent: jax.Array
) -> tuple[CombineOperands, None, None, CotangentSlots | None]:
    saved, group_ids = residuals
    operands = saved.operands
    if rails_beside_dispatch(rails, group_ids.shape[0]) is None:
        gathered = all_gather_tokens(rails, cotangent, group_ids, operands.routing.group_ids)
        gradients, _, slots = one_node.combine_gradients(rails.inner, saved, gathered)
    else:
        grads, slots = rails.combine_grads(operands, cotangent, group_ids, saved.slots)
        gradients = one_node.gradients_of_combine(operands, grads)
    residual = cotangent if saved.has_residual else None
    return dataclasses.replace(gradients, residual=residual), None, None, slots


combine_and_reduce_scatter.defvjp(
    lambda rails, operands, group_ids, result, slots: (
        _combine_and_reduce_scatter(rails, operands, group_ids, result),
        (one_node.save_combine(operands, slots), group_ids),
    ),
    _combine_and_reduce_scatter_bwd,
)


def finish_dispatch(
    rails: OverlappingRails,
    call: InFlightDispatch,
    operands: DispatchOperands,
    group_ids: jax.Array,
    after: Any,
) -> DispatchResults:
    """Waits for a dispatch that the rails have started with these operands."""

    def rule(operands: Any, results: Any, slots: Any) -> DispatchResults:
        return all_gather_and_dispatch(rails, operands, group_ids, results, slots)

    return finish(call, operands, after, rule)


def finish_combine(
    rails: OverlappingRails,
    call: InFlightCombine,
    operands: CombineOperands,
    group_ids: jax.Array,
    after: Any,
) -> jax.Array:
    """Waits for a combine that the rails have started with these operands."""

    def rule(operands: Any, result: Any, slots: Any) -> jax.Array:
        return combine_and_reduce_scatter(rails, operands, group_ids, result, slots)

    return finish(call, operands, after, rule)
