"""Dispatch and combine by custom calls, and their derivatives; base.py has that of redispatch.

The backward of dispatch is a combine: the cotangents of a token's rows are returned and summed, and
those of its weights return beside them. The backward of combine sends each token's cotangent to the
token's rows, where it is scaled by their weights.

If work overlaps with an asynchronous call, its backward is asynchronous as well: overlap.py says
what the `slots` are that the rules take.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from jax_ep.exchange import balance_calls
from jax_ep.exchange.async_calls import InFlightCombine, InFlightDispatch, finish, finished
from jax_ep.exchange.async_primitives import combine_grad_start_p, dispatch_grad_start_p
from jax_ep.exchange.base import Calls
from jax_ep.exchange.calls import (
    bind_combine,
    bind_dispatch,
    combine_call,
    combine_grad_call,
    combine_grad_p,
    combine_p,
    present,
)
from jax_ep.exchange.operands import (
    COMBINE_NAME,
    CombineOperands,
    DispatchOperands,
    DispatchResults,
    Routing,
    Weighting,
)
from jax_ep.exchange.overlap import CotangentSlots, start_in_backward
from jax_ep.geometry import Geometry

_NO_GRADIENT: Any = None  # what custom_vjp expects for integers


class CustomCalls(Calls):
    """One custom call each for dispatch, combine and its backward."""

    def __init__(
        self,
        geometry: Geometry,
        handle_shape: Callable[[int], tuple[int, ...]],
        min_row_elements: int,
        max_row_bytes: int | None = None,
        *,
        are_async: bool,
        lends: bool = False,
    ) -> None:
        """For the transport of a geometry.

        Args:
            geometry: names the group whose handlers serve.
            handle_shape: of a number of tokens, the shape of the int32 handle that dispatch leaves
                for combine.
            min_row_elements: of the shortest float32 row that combine carries.
            max_row_bytes: of the longest row; None: any.
            are_async: whether calls may overlap with other work.
            lends: as the attribute.
        """
        super().__init__(geometry)
        self.handle_shape, self.min_row_elements = handle_shape, min_row_elements
        self._max_row_bytes, self._are_async = max_row_bytes, are_async
        self.lends = lends

    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """One custom call."""
        return dispatch(self, operands)

    def combine(self, operands: CombineOperands) -> jax.Array:
        """One custom call."""
        return combine(self, operands)

    def send_along(self, values: jax.Array, routing: Routing) -> jax.Array:
        """The custom call for the gradients of combine."""
        operands = CombineOperands.unweighted(self.geometry, None, routing)
        arrays, params = combine_grad_call(self.geometry, operands, values)
        return combine_grad_p.bind(*arrays, **params)[0]

    def start(self, operands: DispatchOperands | CombineOperands) -> Any:
        """Starts a call; gradients flow to `operands` in `finish`."""
        if not self._are_async:
            return super().start(operands)
        if isinstance(operands, CombineOperands):
            return InFlightCombine.start(self.geometry, operands)
        handle_shape = self.handle_shape(operands.group_ids.shape[0])
        return InFlightDispatch.start(self.geometry, operands, handle_shape)

    def finish(self, call: Any, operands: Any, after: Any) -> Any:
        """Waits for a call."""
        if not self._are_async:
            return super().finish(call, operands, after)
        rule = dispatch if isinstance(call, InFlightDispatch) else combine
        return finish(call, operands, after, functools.partial(rule, self))

    def balance_choices(self, topk_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two custom calls, if the plan fits."""
        can_balance = self.lends and balance_calls.can_balance(self.geometry)
        if not can_balance or 0 in topk_ids.shape:  # XLA may crash on empty operands of calls
            return super().balance_choices(topk_ids)
        return balance_calls.balance_choices(self.geometry, topk_ids, self.all_gather)

    def n_slices(self, rows: jax.Array) -> int:
        """Rows that are too long take several calls."""
        if self._max_row_bytes is None:
            return 1
        return -(-rows.shape[1] * rows.dtype.itemsize // self._max_row_bytes)


def _dispatch(
    calls: CustomCalls,
    operands: DispatchOperands,
    results: tuple[jax.Array, ...] | None = None,
    slots: CotangentSlots | None = None,
) -> DispatchResults:
    """A dispatch by custom call; with `results`, a completed one."""
    if results is None:
        handle_shape = calls.handle_shape(operands.group_ids.shape[0])
        found = bind_dispatch(calls.geometry, operands, handle_shape)
    else:
        found = finished_dispatch(operands, results)
    return found.named()


def finished_dispatch(
    operands: DispatchOperands, results: tuple[jax.Array, ...]
) -> DispatchResults:
    """The results of a completed dispatch of these operands."""
    given = operands.differentiable()
    return DispatchResults.of(finished(results, given), operands.topk_weights is not None)


dispatch = jax.custom_vjp(_dispatch, nondiff_argnums=(0,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedDispatch:
    """The residuals of dispatch's backward."""

    routing: Routing
    like: DispatchOperands  # without the arrays that it does not read
    slots: CotangentSlots | None


def save_dispatch(
    operands: DispatchOperands, named: DispatchResults, slots: CotangentSlots | None = None
) -> SavedDispatch:
    """From the operands and results of a dispatch."""
    ids, tokens = operands.group_ids, operands.tokens
    routing = Routing(ids, named.handle, named.row_offsets, named.src_info, ids.shape[:1])
    no_tokens = jnp.zeros((0, tokens.shape[1]), tokens.dtype)
    like = dataclasses.replace(
        operands, tokens=no_tokens, group_ids=_NO_GRADIENT, topk_weights=None, input_scale=None
    )
    return SavedDispatch(routing, like, slots)


def _dispatch_fwd(calls: CustomCalls, operands: Any, results: Any, slots: Any) -> Any:
    named = _dispatch(calls, operands, results)
    return named, save_dispatch(operands, named, slots)


def dispatch_gradients(
    calls: CustomCalls, saved: SavedDispatch, cotangents: DispatchResults
) -> tuple[DispatchOperands, None, CotangentSlots | None]:
    """The backward of dispatch."""
    routing, like, slots = saved.routing, saved.like, saved.slots
    token_format, of_weights = calls.geometry.config.token_format, cotangents.row_weights
    if token_format.returns_gradient:
        plain_sum = CombineOperands(cotangents.tokens, routing, row_scalars=of_weights)
        call = combine_call(calls.geometry, plain_sum)
        grads, slots = call_in_backward(slots, combine_p, dispatch_grad_start_p, *call)
    else:
        shape = routing.n_tokens, like.tokens.shape[1]
        zeros = _NO_GRADIENT
        if not like.are_encoded:
            zeros = _zeros(shape, like.tokens.dtype, routing.group_ids[:, :1])
        grads = [zeros]
        if of_weights is not None:
            grads.append(_return_scalars(calls, of_weights, routing))
    return like.replace(grads), None, slots


dispatch.defvjp(_dispatch_fwd, dispatch_gradients)


def _combine(
    calls: CustomCalls,
    operands: CombineOperands,
    result: jax.Array | None = None,
    slots: CotangentSlots | None = None,
) -> jax.Array:
    """A combine by custom call; with `result`, a completed one."""
    if result is None:
        (result,) = bind_combine(calls.geometry, operands)
    else:
        result = finished_combine(operands, result)
    return checkpoint_name(result, COMBINE_NAME)


def finished_combine(operands: CombineOperands, result: jax.Array) -> jax.Array:
    """The result of a completed combine of these operands."""
    given = present(operands.expert_out, operands.weights, operands.residual)
    return finished([result], given)[0]


combine = jax.custom_vjp(_combine, nondiff_argnums=(0,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedCombine:
    """The residuals of combine's backward: the operands, without those that it does not read."""

    operands: CombineOperands
    slots: CotangentSlots | None
    has_residual: bool = dataclasses.field(metadata={"static": True})


def save_combine(operands: CombineOperands, slots: CotangentSlots | None = None) -> SavedCombine:
    """From the operands of a combine."""
    saved = dataclasses.replace(operands, residual=None, shared_rows=None)
    if operands.weighting == Weighting.NONE:
        saved = dataclasses.replace(saved, expert_out=None)
    return SavedCombine(saved, slots, operands.residual is not None)


def combine_gradients(
    calls: CustomCalls, saved: SavedCombine, cotangent: jax.Array
) -> tuple[CombineOperands, None, CotangentSlots | None]:
    """The backward of combine."""
    operands = saved.operands
    call = combine_grad_call(calls.geometry, operands, cotangent)
    grads, slots = call_in_backward(saved.slots, combine_grad_p, combine_grad_start_p, *call)
    residual = cotangent if saved.has_residual else None
    gradients = dataclasses.replace(gradients_of_combine(operands, grads), residual=residual)
    return gradients, None, slots


def gradients_of_combine(operands: CombineOperands, grads: Sequence[jax.Array]) -> CombineOperands:
    """The gradients of a combine's operands, of which those of rows and weights are given."""
    return dataclasses.replace(operands.replace(grads), routing=_NO_GRADIENT)


combine.defvjp(
    lambda calls, operands, result, slots: (
        _combine(calls, operands, result),
        save_combine(operands, slots),
    ),
    combine_gradients,
)


def call_in_backward(
    slots: CotangentSlots | None,
    call_p: Primitive,
    start_p: Primitive,
    arrays: Sequence[jax.Array],
    params: dict[str, Any],
) -> tuple[Sequence[jax.Array], CotangentSlots | None]:
    """The results of a backward's call, and the cotangents of `slots`.

    With slots, the call is asynchronous, and the results are not valid yet: `CotangentSlots`.
    """
    if slots is None:
        return call_p.bind(*arrays, **params), None
    return start_in_backward(start_p, arrays, params, slots)


def _return_scalars(calls: CustomCalls, scalars: jax.Array, routing: Routing) -> jax.Array:
    """Sends one number per row to its choice: `[C]` to `[T, N]`, 0 for choices without a row."""
    shape = scalars.shape[0], calls.min_row_elements
    rows = jnp.broadcast_to(scalars[:, None], shape)
    unreduced = CombineOperands(rows, routing, reduce=False)
    (returned,) = bind_combine(calls.geometry, unreduced)
    return returned[..., 0]


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that JAX batches as it batches `like`.

    For a gradient of zero that is a constant, or None, JAX infers a wrong type under a `vmap` with
    `spmd_axis_name`. XLA sees a constant nevertheless.
    """
    zero = jnp.zeros((), dtype)
    return jnp.broadcast_to(jnp.where(like == like, zero, zero), shape)
