"""Transport `xla`: plain `jax.lax` collectives, on every platform and across processes.

dispatch gathers the tokens of all ranks and selects the rows for the local experts; combine returns
rows by `all_to_all`. JAX differentiates both. The other transports are compared with this one, so
it is simple rather than fast.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange.base import Calls
from jax_ep.exchange.checks import vary_alike
from jax_ep.exchange.numbers import in_float32, round_to
from jax_ep.exchange.operands import (
    COMBINE_NAME,
    CombineOperands,
    DispatchOperands,
    DispatchResults,
)
from jax_ep.formats import QuantizedFormat
from jax_ep.formats.bits import as_integers
from jax_ep.formats.scales import group_of
from jax_ep.geometry import Geometry
from jax_ep.processes.exchange import Exchange
from jax_ep.transports.base import Connection

_NO_ROW = -1


class XlaConnection(Connection):
    """Plain collectives; nothing to open."""

    name = "xla"

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.calls = XlaCalls(geometry)

    @classmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Serves every mesh."""
        return None


class XlaCalls(Calls):
    """Plain collectives, which JAX differentiates."""

    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """Gathers all tokens, already quantized; selects the local experts' rows."""
        geometry, group_ids = self.geometry, operands.group_ids
        all_ids = _all_gather(group_ids, geometry)
        rows = _assign_rows(geometry, all_ids, operands.max_recv_tokens)
        choices, n_choices = rows.choices, geometry.routed.n_choices
        sources = choices // n_choices
        row_info = jnp.stack([sources % group_ids.shape[0], choices % n_choices], 1)
        tokens, scales = _take_rows(geometry, operands, sources, rows.row_offsets)
        is_invalid = (group_ids < -1) | (group_ids >= geometry.routed.n_groups)
        row_weights = None
        if operands.topk_weights is not None:
            all_weights = _all_gather(operands.topk_weights, geometry)
            row_weights = _take(all_weights.reshape(-1), choices)
        results = DispatchResults(
            tokens=tokens,
            row_offsets=rows.row_offsets,
            src_info=jnp.where((choices < all_ids.size)[:, None], row_info, _NO_ROW),
            n_dropped=rows.n_dropped,
            n_invalid=jnp.sum(is_invalid, dtype=jnp.int32),
            handle=rows.dst_rows,
            row_weights=row_weights,
            scales=scales,
        )
        return results.named()

    def combine(self, operands: CombineOperands) -> jax.Array:
        """Returns each rank's sums, or the rows, to the tokens' ranks, which add the sums."""
        geometry, expert_out = self.geometry, operands.expert_out
        routing, topk_weights = operands.routing, operands.topk_weights
        rows = routing.handle
        if not operands.reduce:
            out = _return_rows(geometry, expert_out, rows, routing.group_ids, self.may_loop)
            return checkpoint_name(out, COMBINE_NAME)
        shared_rows = None
        if operands.adds_shared_expert:
            shared_rows, rows = rows[_rank(geometry), :, -1], rows[..., :-1]
            topk_weights = None if topk_weights is None else topk_weights[:, :-1]
        weights = operands.row_weights
        if topk_weights is not None:
            weights = _send_weights(geometry, topk_weights, rows, expert_out.shape[0])
        out = _sum_by_node(geometry, _sum_by_rank(geometry, expert_out, rows, weights))
        if operands.residual is not None:
            out = out + in_float32(operands.residual)
        out = out.astype(expert_out.dtype)
        if shared_rows is not None:
            out = _add_shared_expert(out, expert_out, shared_rows)
        return checkpoint_name(out, COMBINE_NAME)


def _rank(geometry: Geometry) -> jax.Array | int:
    """This rank's index among those that exchange tokens."""
    return 0 if geometry.config.skip_a2a else lax.axis_index(geometry.axis_name)


def _all_gather(x: jax.Array, geometry: Geometry) -> jax.Array:
    return x[None] if geometry.config.skip_a2a else lax.all_gather(x, geometry.axis_name)


def _all_to_all(x: jax.Array, geometry: Geometry) -> jax.Array:
    """`[R, ...]` by destination to `[R, ...]` by source."""
    return x if geometry.config.skip_a2a else lax.all_to_all(x, geometry.axis_name, 0, 0)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `x`; zero where the index is out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


def _index(rows: jax.Array, of: jax.Array) -> jax.Array:
    """`rows`, but out of the range of `of` in place of -1, which would be the last row."""
    return jnp.where(rows >= 0, rows, of.shape[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bits(move: Callable[..., jax.Array], x: jax.Array, *where: jax.Array) -> jax.Array:
    """`move(x, *where)`, which permutes, repeats or zeroes elements, bit by bit.

    XLA:CPU handles bfloat16 as float32, which changes NaNs. So integers are moved; the derivative
    moves floats.
    """
    return lax.bitcast_convert_type(move(as_integers(x), *where), x.dtype)


@_move_bits.defjvp
def _move_bits_jvp(
    move: Callable[..., jax.Array], primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    return _move_bits(move, *primals), move(tangents[0], *primals[1:])


def _take_rows(
    geometry: Geometry, operands: DispatchOperands, sources: jax.Array, row_offsets: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """This rank's rows of all ranks' tokens, and their scales; zero for unused rows."""

    def take(x: jax.Array, index: jax.Array) -> jax.Array:
        return _take(_all_gather(x, geometry).reshape(-1, *x.shape[1:]), index)

    token_format, tokens = operands.token_format, operands.tokens
    if not token_format.returns_gradient:
        tokens = lax.stop_gradient(tokens)
    if not isinstance(token_format, QuantizedFormat):
        return _move_bits(take, tokens, sources), None
    codes, scales = token_format.quantize(tokens, operands.input_scale)
    codes, scales = (_move_bits(take, x, sources) for x in (codes, scales))
    return codes, token_format.layout.place(scales, row_offsets)


class _Rows(NamedTuple):
    """Maps choices to rows of this rank.

    `choices` has the choice behind each row, an index into all ranks' ids flattened; out of range
    for unused rows.
    """

    row_offsets: jax.Array  # uint32[n_local_groups + 1]
    choices: jax.Array  # int32[C]
    dst_rows: jax.Array  # int32[R, T, N], the row of each choice here; -1 = none
    n_dropped: jax.Array  # int32[]


def _assign_rows(geometry: Geometry, all_ids: jax.Array, capacity: int) -> _Rows:
    """Sorts all ranks' choices, `int32[R, T, N]`, into this rank's `capacity` rows."""
    n_local = geometry.routed.n_local_groups
    first = _rank(geometry) * n_local
    ids, n_groups = all_ids.reshape(-1), geometry.routed.n_groups
    is_local = (ids >= first) & (ids < first + n_local) & (ids < n_groups)
    groups = jnp.where(is_local, ids - first, n_local)
    counts = jnp.zeros(n_local, jnp.int32).at[groups].add(1, mode="drop")
    # Choices are numbered by source rank, token, k: a stable sort gives row order.
    order = jnp.argsort(groups, stable=True).astype(jnp.int32)
    position = (  # of each choice, in row order
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    )
    alignment = geometry.config.group_alignment
    padding = _offsets(-counts % alignment)  # rows that pad the preceding groups
    dst_rows = position + padding[groups]
    has_row = is_local & (dst_rows < capacity)
    offsets = _offsets(counts)
    starts = offsets + padding
    group = group_of(starts, capacity)
    in_order = jnp.arange(capacity, dtype=jnp.int32) - padding[group]
    is_used = in_order < offsets[group + 1]
    return _Rows(
        jnp.minimum(starts, capacity).astype(jnp.uint32),
        jnp.where(is_used, _take(order, in_order), order.size),
        jnp.where(has_row, dst_rows, _NO_ROW).reshape(all_ids.shape),
        jnp.sum(is_local, dtype=jnp.int32) - jnp.sum(has_row, dtype=jnp.int32),
    )


def _offsets(sizes: jax.Array) -> jax.Array:
    """Exclusive prefix sums of the sizes, then their total."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends])


def _return_rows(
    geometry: Geometry,
    expert_out: jax.Array,
    dst_rows: jax.Array,
    group_ids: jax.Array,
    may_loop: bool,
) -> jax.Array:
    """The rows of this rank's choices, `[T, N, H]`; zero for choices without one."""
    routed = geometry.routed
    ranks = jnp.clip(group_ids // routed.n_local_groups, 0, routed.n_ranks - 1)
    has_row = jnp.any(_all_to_all(dst_rows >= 0, geometry), axis=0)

    def send_back(
        rows: jax.Array, dst_rows: jax.Array, ranks: jax.Array, has_row: jax.Array
    ) -> jax.Array:
        def pick(choices: tuple[jax.Array, jax.Array]) -> jax.Array:
            index, rank = choices  # [R, T, ...] of every source, [T, ...] of this one
            received = _all_to_all(_take(rows, _index(index, rows)), geometry)
            return jnp.take_along_axis(received, rank[None, ..., None], axis=0)[0]

        if not may_loop:
            return jnp.where(has_row[..., None], pick((dst_rows, ranks)), 0)
        # One choice at a time needs a buffer of [R, T, H], not [R, T, N, H].
        picked = lax.map(pick, (jnp.moveaxis(dst_rows, 2, 0), ranks.T))
        return jnp.where(has_row[..., None], jnp.moveaxis(picked, 0, 1), 0)

    return _move_bits(send_back, expert_out, dst_rows, ranks, has_row)


def _send_weights(
    geometry: Geometry, topk_weights: jax.Array, dst_rows: jax.Array, n_rows: int
) -> jax.Array:
    """`float32[C]`: the weight of each row of this rank; 0 for unused rows."""
    weights = _all_gather(topk_weights, geometry)
    rows = jnp.zeros(n_rows, weights.dtype)
    # Adds one number to each row in use.
    return rows.at[_index(dst_rows, rows)].add(weights, mode="drop")


def _sum_by_rank(
    geometry: Geometry, expert_out: jax.Array, dst_rows: jax.Array, row_weights: jax.Array | None
) -> jax.Array:
    """`[R, T, H]`: each rank's sum of its rows of this rank's tokens, in k order, rounded."""
    terms = in_float32(expert_out)
    if row_weights is not None:
        # XLA:GPU would otherwise fuse this with the sum, and round only that.
        terms = lax.optimization_barrier(terms * row_weights[:, None])

    def add(sums: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        return sums + _take(terms, _index(rows, terms)), None

    zeros = jnp.zeros((*dst_rows.shape[:2], terms.shape[1]), terms.dtype)
    sums, _ = lax.scan(add, vary_alike((), zeros, terms)[0], jnp.moveaxis(dst_rows, 2, 0))
    return _all_to_all(round_to(sums, expert_out.dtype).astype(expert_out.dtype), geometry)


def _sum_by_node(geometry: Geometry, rank_sums: jax.Array) -> jax.Array:
    """float32 `[T, H]`: the sum in rank order; of several nodes' rounded sums in node order."""
    sums, n_nodes = rank_sums.astype(jnp.float32), geometry.routed.n_nodes
    if n_nodes > 1:
        by_node = sums.reshape(n_nodes, -1, *sums.shape[1:])
        sums = round_to(_sum_in_order(by_node, axis=1), rank_sums.dtype)
    return _sum_in_order(sums, axis=0)


def _add_shared_expert(out: jax.Array, expert_out: jax.Array, shared_rows: jax.Array) -> jax.Array:
    """`out` `[T, H]` plus each token's row of the shared expert; -1 = none."""
    shared = _take(expert_out, _index(shared_rows, expert_out))
    total = in_float32(out) + in_float32(shared)
    # A token without such a row keeps its -0.
    return jnp.where((shared_rows >= 0)[:, None], total.astype(out.dtype), out)


def _sum_in_order(terms: jax.Array, axis: int) -> jax.Array:
    """Sum along an axis, first to last, starting from +0.

    A loop, so that XLA cannot fuse a product into the sum: a fused multiply-add rounds
    once, and the contract rounds twice.
    """
    terms = jnp.moveaxis(terms, axis, 0)
    zero = vary_alike((), jnp.zeros(terms.shape[1:], terms.dtype), terms)[0]
    total = lax.scan(lambda total, term: (total + term, None), zero, terms)[0]
    # XLA drops "0 +" from a loop of one step. A sum that starts at +0 is never -0.
    return total + lax.stop_gradient(jnp.where(total == 0, -total, zero))
