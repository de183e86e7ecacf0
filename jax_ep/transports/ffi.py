"""What the transports `host` and `p2p` share: custom calls, made differentiable.

The backward of dispatch is a combine: the cotangents of a token's rows come back and
are added up. The backward of combine sends the cotangents to the rows; how is the
transport's.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from jax_ep.formats import QuantizedFormat, TokenFormat
from jax_ep.overlap import awaited
from jax_ep.primitives import Weighting, combine_p, dispatch_p
from jax_ep.results import Dispatched
from jax_ep.transports.base import COMBINE_NAME, DISPATCH_NAME, Transport, assemble

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


class Mode(NamedTuple):
    """What is static in a combine."""

    weighting: Weighting
    reduce: bool
    has_residual: bool
    adds_shared: bool  # the last choice is the shared expert's; see Transport.combine


PLAIN_SUM = Mode(Weighting.NONE, reduce=True, has_residual=False, adds_shared=False)
UNREDUCED = PLAIN_SUM._replace(reduce=False)


class Routing(NamedTuple):
    """Which choice has which row.

    `topk_ids` is `int32[T, K]`, at the choices' source; `layout` is the transport's;
    `row_offsets` is `uint32[L + 1]` and `src_info` `int32[C, 2]`, at the rows' rank. A
    fused shared expert counts as one of the L, the first, and of the K, the last.
    """

    topk_ids: jax.Array
    layout: jax.Array
    row_offsets: jax.Array
    src_info: jax.Array


class FfiTransport(Transport):
    """One custom call each for dispatch and combine, forward and backward."""

    # Elements of the smallest row of float32 that combine carries.
    smallest_row: int

    @abc.abstractmethod
    def layout_shape(self, group: EPGroup, n_tokens: int) -> tuple[int, ...]:
        """Shape of what dispatch leaves for combine, an int32 array."""

    @abc.abstractmethod
    def combine_backward(
        self,
        group: EPGroup,
        mode: Mode,
        expert_out: jax.Array,
        weights: jax.Array | None,
        routing: Routing,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Gradients of `expert_out`, 0 in rows that are not in use, and `weights`."""

    def dispatch(
        self,
        group: EPGroup,
        tokens: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None,
        input_scale: jax.Array | None,
        results: tuple[jax.Array, ...] | None = None,
    ) -> Dispatched:
        """One custom call, or none where its `results` are there already."""
        fields = _dispatch(group, tokens, topk_ids, topk_weights, input_scale, results)
        return assemble(group, topk_ids, fields)

    def combine(
        self,
        group: EPGroup,
        expert_out: jax.Array,
        dispatched: Dispatched,
        topk_weights: jax.Array | None,
        residual: jax.Array | None,
        *,
        reduce: bool,
        adds_shared: bool,
        out: jax.Array | None = None,
    ) -> jax.Array:
        """One custom call, or none where its result is there already."""
        weighting, weights = choose_weights(dispatched, topk_weights)
        mode = Mode(weighting, reduce, residual is not None, adds_shared)
        routing = routing_of(dispatched)
        return _combine(group, mode, expert_out, weights, residual, routing, out)


def choose_weights(
    dispatched: Dispatched, topk_weights: jax.Array | None
) -> tuple[Weighting, jax.Array | None]:
    """The weights of a combine, and where they apply."""
    if topk_weights is not None:
        return Weighting.SOURCE, topk_weights
    if dispatched.row_weights is not None:
        return Weighting.ROW, dispatched.row_weights
    return Weighting.NONE, None


def routing_of(dispatched: Dispatched) -> Routing:
    """The part of `dispatched` that says which choice has which row."""
    return Routing(
        dispatched.topk_ids,
        dispatched.layout,
        dispatched.row_offsets,
        dispatched.src_info,
    )


def bind_dispatch(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    input_scale: jax.Array | None = None,
    token_format: TokenFormat | None = None,
) -> dict[str, Any]:
    """The custom call of dispatch: the fields of `Dispatched` that it fills.

    `token_format` is the group's if None; cotangents travel in another.
    """
    operands, params = dispatch_call(
        group, tokens, topk_ids, topk_weights, input_scale, token_format
    )
    return _fields(dispatch_p.bind(*operands, **params), topk_weights is not None)


def dispatch_call(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    input_scale: jax.Array | None,
    token_format: TokenFormat | None = None,
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Operands and parameters of `dispatch_p`."""
    optional = present(topk_weights, input_scale)
    params = dict(
        group=group,
        weighting=Weighting.NONE if topk_weights is None else Weighting.ROW,
        layout_shape=_transport(group).layout_shape(group, topk_ids.shape[0]),
        token_format=token_format or group.config.token_format,
    )
    return [place_index(group), tokens, topk_ids, *optional], params


def _fields(results: Sequence[jax.Array], has_weights: bool) -> dict[str, Any]:
    """The results of `dispatch_p`, by their names in `Dispatched`."""
    rows, row_offsets, src_info, n_dropped, n_invalid, layout, *optional = results
    row_weights = optional.pop(0) if has_weights else None
    return dict(
        tokens=rows,
        row_offsets=row_offsets,
        src_info=src_info,
        n_dropped=n_dropped,
        n_invalid=n_invalid,
        layout=layout,
        row_weights=row_weights,
        scales=optional[0] if optional else None,
    )


def bind_combine(
    group: EPGroup,
    mode: Mode,
    expert_out: jax.Array,
    routing: Routing,
    *optional: jax.Array | None,
    primitive: Primitive = combine_p,
) -> Any:
    """What `primitive` gives, a combine; `optional`: weights, residual."""
    return primitive.bind(
        place_index(group),
        expert_out,
        routing.topk_ids,
        routing.layout,
        *present(*optional),
        group=group,
        **mode._asdict(),
    )


def place_index(group: EPGroup) -> jax.Array:
    """Where the program means to be, for the handler to compare.

    The row of the mesh, counted over its other axes, times R, plus the rank. The same
    number where each device is a group of ranks of its own.
    """
    others = tuple(n for n in group.mesh.axis_names if n != group.axis_name)
    rank = lax.axis_index(group.axis_name)
    return lax.axis_index(others) * group.n_ranks + rank if others else rank


def _transport(group: EPGroup) -> FfiTransport:
    transport = group._transport
    assert isinstance(transport, FfiTransport)
    return transport


def present(*optional: jax.Array | None) -> list[jax.Array]:
    """Those that are not None."""
    return [x for x in optional if x is not None]


def send_back_scalars(
    group: EPGroup, scalars: jax.Array, routing: Routing
) -> jax.Array:
    """A number per row to its choice: `[C]` to `[T, K]`, 0 where there is no row."""
    size = _transport(group).smallest_row
    rows = jnp.broadcast_to(scalars[:, None], (scalars.shape[0], size))
    return bind_combine(group, UNREDUCED, rows, routing)[..., 0]


def _call_dispatch(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    input_scale: jax.Array | None,
    results: tuple[jax.Array, ...] | None,
) -> dict[str, Any]:
    if results is None:
        fields = bind_dispatch(group, tokens, topk_ids, topk_weights, input_scale)
    else:
        given = present(tokens, topk_weights)
        fields = _fields(awaited(results, given), topk_weights is not None)
    return checkpoint_name(fields, DISPATCH_NAME)


_dispatch = jax.custom_vjp(_call_dispatch, nondiff_argnums=(0,))


def _dispatch_fwd(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    input_scale: jax.Array | None,
    results: tuple[jax.Array, ...] | None,
) -> tuple[dict[str, Any], Any]:
    fields = _call_dispatch(group, tokens, topk_ids, topk_weights, input_scale, results)
    return fields, Routing(
        topk_ids, fields["layout"], fields["row_offsets"], fields["src_info"]
    )


def _dispatch_bwd(
    group: EPGroup, routing: Routing, cotangents: dict[str, Any]
) -> tuple[Any, ...]:
    grad_tokens = None
    if not isinstance(group.config.token_format, QuantizedFormat):  # see dequantize
        grad_tokens = bind_combine(group, PLAIN_SUM, cotangents["tokens"], routing)
    grad_weights = None
    if cotangents["row_weights"] is not None:
        grad_weights = send_back_scalars(group, cotangents["row_weights"], routing)
    return grad_tokens, None, grad_weights, None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _call_combine(
    group: EPGroup,
    mode: Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: Routing,
    out: jax.Array | None,
) -> jax.Array:
    if out is None:
        out = bind_combine(group, mode, expert_out, routing, weights, residual)
    else:
        (out,) = awaited([out], present(expert_out, weights, residual))
    return checkpoint_name(out, COMBINE_NAME)


_combine = jax.custom_vjp(_call_combine, nondiff_argnums=(0, 1))


def _combine_fwd(
    group: EPGroup,
    mode: Mode,
    expert_out: jax.Array,
    weights: jax.Array | None,
    residual: jax.Array | None,
    routing: Routing,
    out: jax.Array | None,
) -> tuple[jax.Array, Any]:
    out = _call_combine(group, mode, expert_out, weights, residual, routing, out)
    return out, (expert_out, weights, routing)


def _combine_bwd(
    group: EPGroup, mode: Mode, saved: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    expert_out, weights, routing = saved
    grad_expert_out, grad_weights = _transport(group).combine_backward(
        group, mode, expert_out, weights, routing, cotangent
    )
    grad_residual = cotangent if mode.has_residual else None
    return grad_expert_out, grad_weights, grad_residual, None, None


_combine.defvjp(_combine_fwd, _combine_bwd)
