"""Dispatch, combine and redispatch by custom calls, and their differentiation rules.

The backward of dispatch is a combine: the cotangents of a token's rows are returned and summed, and
those of its weights return beside them. The backward of combine sends each token's cotangent to the
token's rows, where it is scaled by their weights.

If work overlaps with an asynchronous call, its backward is asynchronous as well: see overlap.py for
the `slots` that the rules take.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_ep.exchange import calls as primitives
from jax_ep.exchange.async_calls import finished
from jax_ep.exchange.async_primitives import combine_grad_start_p, dispatch_grad_start_p
from jax_ep.exchange.operands import (
    COMBINE_NAME,
    DISPATCH_NAME,
    CombineOperands,
    DispatchOperands,
    DispatchResults,
    Routing,
    Weighting,
)
from jax_ep.exchange.overlap import CotangentSlots, call_in_backward
from jax_ep.transports.base import Connection

_NO_GRADIENT: Any = None  # what custom_vjp expects for integers


def _dispatch(
    connection: "FfiConnection",
    operands: DispatchOperands,
    results: tuple[jax.Array, ...] | None = None,
    slots: CotangentSlots | None = None,
) -> DispatchResults:
    """A dispatch by custom call; with `results`, a completed one."""
    if results is None:
        handle_shape = connection.handle_shape(operands.group_ids.shape[0])
        found = primitives.bind_dispatch(connection.geometry, operands, handle_shape)
    else:
        found = finished_dispatch(operands, results)
    return found.named()


def finished_dispatch(
    operands: DispatchOperands, results: tuple[jax.Array, ...]
) -> DispatchResults:
    """The results of a completed dispatch of these operands."""
    given = operands.with_gradients()
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


def _dispatch_fwd(connection: "FfiConnection", operands: Any, results: Any, slots: Any) -> Any:
    named = _dispatch(connection, operands, results)
    return named, save_dispatch(operands, named, slots)


def dispatch_gradients(
    connection: "FfiConnection", saved: SavedDispatch, cotangents: DispatchResults
) -> tuple[DispatchOperands, None, CotangentSlots | None]:
    """The backward of dispatch."""
    routing, like, slots = saved.routing, saved.like, saved.slots
    token_format, of_weights = connection.geometry.config.token_format, cotangents.row_weights
    if token_format.returns_gradient:
        plain_sum = CombineOperands(cotangents.tokens, routing, row_scalars=of_weights)
        call = primitives.combine_call(connection.geometry, plain_sum)
        grads, slots = call_in_backward(slots, primitives.combine_p, dispatch_grad_start_p, *call)
    else:
        shape = routing.n_tokens, like.tokens.shape[1]
        zeros = _NO_GRADIENT
        if not like.are_encoded:
            zeros = _zeros(shape, like.tokens.dtype, routing.group_ids[:, :1])
        grads = [zeros]
        if of_weights is not None:
            grads.append(_return_scalars(connection, of_weights, routing))
    return like.replace(grads), None, slots


dispatch.defvjp(_dispatch_fwd, dispatch_gradients)


def _combine(
    connection: "FfiConnection",
    operands: CombineOperands,
    result: jax.Array | None = None,
    slots: CotangentSlots | None = None,
) -> jax.Array:
    """A combine by custom call; with `result`, a completed one."""
    if result is None:
        (result,) = primitives.bind_combine(connection.geometry, operands)
    else:
        result = finished_combine(operands, result)
    return checkpoint_name(result, COMBINE_NAME)


def finished_combine(operands: CombineOperands, result: jax.Array) -> jax.Array:
    """The result of a completed combine of these operands."""
    given = primitives.present(operands.expert_out, operands.weights, operands.residual)
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
    connection: "FfiConnection", saved: SavedCombine, cotangent: jax.Array
) -> tuple[CombineOperands, None, CotangentSlots | None]:
    """The backward of combine."""
    operands = saved.operands
    call = primitives.combine_grad_call(connection.geometry, operands, cotangent)
    grads, slots = call_in_backward(
        saved.slots, primitives.combine_grad_p, combine_grad_start_p, *call
    )
    residual = cotangent if saved.has_residual else None
    gradients = dataclasses.replace(gradients_of_combine(operands, grads), residual=residual)
    return gradients, None, slots


def gradients_of_combine(operands: CombineOperands, grads: Sequence[jax.Array]) -> CombineOperands:
    """The gradients of a combine's operands, of which those of rows and weights are given."""
    return dataclasses.replace(operands.replace(grads), routing=_NO_GRADIENT)


combine.defvjp(
    lambda connection, operands, result, slots: (
        _combine(connection, operands, result),
        save_combine(operands, slots),
    ),
    combine_gradients,
)


def _redispatch(connection: Connection, values: jax.Array, routing: Routing) -> jax.Array:
    return checkpoint_name(connection.send_along(values, routing), DISPATCH_NAME)


redispatch = jax.custom_vjp(_redispatch, nondiff_argnums=(0,))


def _redispatch_bwd(
    connection: Connection, routing: Routing, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    operands = CombineOperands.unweighted(connection.geometry, cotangent, routing)
    return connection.combine(operands), _NO_GRADIENT


redispatch.defvjp(
    lambda connection, values, routing: (_redispatch(connection, values, routing), routing),
    _redispatch_bwd,
)


def _return_scalars(connection: "FfiConnection", scalars: jax.Array, routing: Routing) -> jax.Array:
    """Sends one number per row to its choice: `[C]` to `[T, N]`, 0 for choices without a row."""
    shape = scalars.shape[0], connection.min_row_elements
    rows = jnp.broadcast_to(scalars[:, None], shape)
    unreduced = CombineOperands(rows, routing, reduce=False)
    (returned,) = primitives.bind_combine(connection.geometry, unreduced)
    return returned[..., 0]


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that JAX batches as it batches `like`.

    For a gradient of zero that is a constant, or None, JAX infers a wrong type under a `vmap` with
    `spmd_axis_name`. XLA sees a constant nevertheless.
    """
    zero = jnp.zeros((), dtype)
    return jnp.broadcast_to(jnp.where(like == like, zero, zero), shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(
    connection: Connection, source_tokens: jax.Array, rows: jax.Array, routing: Routing
) -> jax.Array:
    """`rows`, as if they were the unquantized rows of `source_tokens`, which get the gradient.

    For formats that quantize, and for float16, whose sums travel in another dtype.
    """
    return rows


straight_through.defvjp(
    lambda connection, source_tokens, rows, routing: (rows, routing),
    lambda connection, routing, cotangent: (connection.pull_back(cotangent, routing), None, None),
)


def without_gradient(
    call: str, source_tokens: jax.Array, codes: jax.Array, scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales that `source_tokens` became; raises where a gradient reaches them.

    It would be dropped: `dequantize` has a rule of its own, which takes the gradient past them.
    """
    with jax.disable_jit(False):
        return _codes_and_scales(call, source_tokens, codes, scales)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(call: str, source_tokens: Any, codes: Any, scales: Any) -> Any:
    return codes, scales


def _no_gradient(call: str, _: None, cotangents: Any) -> tuple[None, None, None]:
    def is_zero(cotangent: Any) -> bool:
        is_symbolic = isinstance(cotangent, SymbolicZero)
        return is_symbolic or getattr(cotangent, "dtype", None) == jax.dtypes.float0

    if all(map(is_zero, cotangents)):
        return None, None, None
    raise NotImplementedError(
        f"{call}: tokens and scales of its result are codes, which have no gradient. Take the rows "
        "from jax_ep.dequantize() or call jax_ep.expert_mlp(), whose gradients pass straight "
        "through the rounding; or pass both through jax.lax.stop_gradient()."
    )


_identity.defvjp(
    lambda call, source_tokens, codes, scales: ((codes.value, scales.value), None),
    _no_gradient,
    symbolic_zeros=True,
)
# Under a jit, since a jax.shard_map that runs eagerly has no symbolic zeros.
_codes_and_scales = jax.jit(_identity, static_argnums=0, inline=True)


class FfiConnection(Connection):
    """One custom call each for dispatch, combine and its backward."""

    min_row_elements: ClassVar[int]  # of the shortest float32 row that combine carries

    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """One custom call."""
        return dispatch(self, operands)

    def combine(self, operands: CombineOperands) -> jax.Array:
        """One custom call."""
        return combine(self, operands)

    def send_along(self, values: jax.Array, routing: Routing) -> jax.Array:
        """By the custom call for the gradients of combine."""
        operands = CombineOperands.unweighted(self.geometry, None, routing)
        arrays, params = primitives.combine_grad_call(self.geometry, operands, values)
        return primitives.combine_grad_p.bind(*arrays, **params)[0]

    @abc.abstractmethod
    def handle_shape(self, n_tokens: int) -> tuple[int, ...]:
        """Shape of the int32 handle that dispatch leaves for combine."""
