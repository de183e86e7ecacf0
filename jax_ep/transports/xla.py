"""Transport `xla`: plain `jax.lax` collectives, on every platform and over processes.

dispatch gathers every rank's tokens and takes the local experts' rows out of them;
combine sends rows back by `all_to_all`. JAX differentiates it. What the other
transports are compared with: simple before fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.config import EPConfig
from jax_ep.exchange import Exchange
from jax_ep.formats import QuantizedFormat
from jax_ep.results import Dispatched
from jax_ep.transports.base import COMBINE_NAME, DISPATCH_NAME, Transport, assemble

if TYPE_CHECKING:
    from jax_ep.group import EPGroup

_NO_ROW = -1


class XlaTransport(Transport):
    """Plain collectives."""

    name = "xla"

    def why_not(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        config: EPConfig,
        exchange: Exchange,
    ) -> str | None:
        """Serves every mesh."""
        return None

    def open(self, group: EPGroup, exchange: Exchange) -> None:
        """Nothing to set up."""

    def close(self, group: EPGroup) -> None:
        """Nothing to free."""

    def dispatch(
        self,
        group: EPGroup,
        tokens: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None,
        input_scale: jax.Array | None,
    ) -> Dispatched:
        """Gathers all tokens, quantised before; takes the local experts' rows."""
        all_ids = _all_gather(topk_ids, group)
        routed = _group_choices(group, all_ids)
        choices, top_k = routed.choices, group._routed.top_k
        sources = choices // top_k
        row_info = jnp.stack([sources % topk_ids.shape[0], choices % top_k], axis=1)
        rows, scales = _take_rows(
            group, tokens, input_scale, sources, routed.row_offsets
        )
        results = dict(
            tokens=rows,
            scales=scales,
            row_offsets=routed.row_offsets,
            src_info=jnp.where((choices < all_ids.size)[:, None], row_info, _NO_ROW),
            n_dropped=routed.n_dropped,
            n_invalid=_count_invalid(topk_ids, group._routed.n_experts),
            layout=routed.dst_rows,
            row_weights=None
            if topk_weights is None
            else _take(_flat(_all_gather(topk_weights, group), 3), choices),
        )
        return assemble(group, topk_ids, checkpoint_name(results, DISPATCH_NAME))

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
    ) -> jax.Array:
        """Sends each rank its rows, or its sums, and adds them up there."""
        rows, topk_ids = dispatched.layout, dispatched.topk_ids
        if adds_shared:
            shared_rows = rows[_rank(group), :, -1]
            rows, topk_ids = rows[..., :-1], topk_ids[:, :-1]
            topk_weights = None if topk_weights is None else topk_weights[:, :-1]
        if dispatched.row_weights is not None:
            out = _sum_by_rank(group, expert_out, rows, dispatched.row_weights)
        else:
            picked, present = _return_rows(group, expert_out, rows, topk_ids)
            if not reduce:
                return checkpoint_name(picked, COMBINE_NAME)
            out = _sum_by_choice(picked, present, topk_weights)
        if residual is not None:
            out = out + residual.astype(jnp.float32)
        out = out.astype(expert_out.dtype)
        if adds_shared:
            out = _add_shared(out, expert_out, shared_rows)
        return checkpoint_name(out, COMBINE_NAME)


def _rank(group: EPGroup) -> jax.Array | int:
    """This rank's index among those that exchange tokens."""
    return 0 if group.config.skip_a2a else lax.axis_index(group.axis_name)


def _all_gather(x: jax.Array, group: EPGroup) -> jax.Array:
    return x[None] if group.config.skip_a2a else lax.all_gather(x, group.axis_name)


def _all_to_all(x: jax.Array, group: EPGroup) -> jax.Array:
    """`[R, ...]` by destination to `[R, ...]` by source."""
    return x if group.config.skip_a2a else lax.all_to_all(x, group.axis_name, 0, 0)


def _flat(x: jax.Array, n_axes: int) -> jax.Array:
    """Merges the first axes into one."""
    return x.reshape(-1, *x.shape[n_axes:])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `x`; zero where the index is out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bits(
    move: Callable[..., jax.Array], x: jax.Array, *where: jax.Array
) -> jax.Array:
    """`move(x, *where)`, whose elements are those of `x`, or zero, to the last bit.

    XLA:CPU treats bfloat16 by way of float32, which changes NaNs. So the move is one of
    integers, and its derivative that of the move of numbers.
    """
    integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    moved = move(lax.bitcast_convert_type(x, integer), *where)
    return lax.bitcast_convert_type(moved, x.dtype)


@_move_bits.defjvp
def _move_bits_jvp(
    move: Callable[..., jax.Array], primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    return _move_bits(move, *primals), move(tangents[0], *primals[1:])


def _count_invalid(topk_ids: jax.Array, n_experts: int) -> jax.Array:
    return jnp.sum((topk_ids < -1) | (topk_ids >= n_experts), dtype=jnp.int32)


def _take_rows(
    group: EPGroup,
    tokens: jax.Array,
    input_scale: jax.Array | None,
    sources: jax.Array,
    row_offsets: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """This rank's rows of all ranks' tokens, and their scales; zero where none is."""

    def take(x: jax.Array, index: jax.Array) -> jax.Array:
        return _take(_flat(_all_gather(x, group), 2), index)

    token_format = group.config.token_format
    if not isinstance(token_format, QuantizedFormat):
        return _move_bits(take, tokens, sources), None
    # Straight through: the gradient's way is that of `dequantize`.
    tokens = lax.stop_gradient(tokens)
    codes, scales = token_format.quantize(tokens, input_scale)
    codes, scales = (_move_bits(take, x, sources) for x in (codes, scales))
    return codes, token_format.layout.place(scales, row_offsets)


class _Routed(NamedTuple):
    """Which choice becomes which row of this rank.

    `row_offsets` is `uint32[L + 1]`; `choices` `int32[C]` is the choice behind each
    row, an index into all ranks' `topk_ids` flat, out of range where there is none;
    `dst_rows` `int32[R, T, K]` is the row of each choice here, -1 = none; `n_dropped`
    `int32[]`.
    """

    row_offsets: jax.Array
    choices: jax.Array
    dst_rows: jax.Array
    n_dropped: jax.Array


def _group_choices(group: EPGroup, all_ids: jax.Array) -> _Routed:
    """Sorts all ranks' choices, `int32[R, T, K]`, into this rank's rows."""
    n_local, capacity = group._routed.n_groups, group.max_recv_tokens
    first = _rank(group) * n_local
    ids = all_ids.reshape(-1)
    n_experts = group._routed.n_experts
    is_local = (ids >= first) & (ids < first + n_local) & (ids < n_experts)
    experts = jnp.where(is_local, ids - first, n_local)
    counts = jnp.zeros(n_local, jnp.int32).at[experts].add(1, mode="drop")
    # Stable, and choices are numbered by source rank, token, k: the order of rows.
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    rank_in_order = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    )
    alignment = group.config.token_format.layout.row_alignment
    padding = _offsets(-counts % alignment)  # rows that pad the groups before
    dst_rows = rank_in_order + padding[experts]
    has_row = is_local & (dst_rows < capacity)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    row = jnp.arange(capacity, dtype=jnp.int32)
    expert = jnp.searchsorted(ends + padding[1:], row, side="right").astype(jnp.int32)
    in_order = row - padding[expert]
    is_used = in_order < _take(ends, expert)
    return _Routed(
        jnp.minimum(_offsets(counts) + padding, capacity).astype(jnp.uint32),
        jnp.where(is_used, _take(order, in_order), order.size),
        jnp.where(has_row, dst_rows, _NO_ROW).reshape(all_ids.shape),
        jnp.sum(is_local, dtype=jnp.int32) - jnp.sum(has_row, dtype=jnp.int32),
    )


def _offsets(sizes: jax.Array) -> jax.Array:
    """`[L + 1]`: the sum of the sizes before each, and of all."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends])


def _return_rows(
    group: EPGroup, expert_out: jax.Array, dst_rows: jax.Array, topk_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rows of this rank's choices `[T, K, H]`, and which have one `bool[T, K]`."""
    routed = group._routed
    ranks = jnp.clip(topk_ids // routed.n_groups, 0, routed.n_ranks - 1)
    present = jnp.any(_all_to_all(dst_rows >= 0, group), axis=0)

    def send_back(
        rows: jax.Array, dst_rows: jax.Array, ranks: jax.Array, present: jax.Array
    ) -> jax.Array:
        def one_choice(choice: tuple[jax.Array, jax.Array]) -> jax.Array:
            index, rank = choice  # [R, T] of every source, [T] of this one
            sent = _take(rows, jnp.where(index >= 0, index, rows.shape[0]))
            received = _all_to_all(sent, group)
            return jnp.take_along_axis(received, rank[None, :, None], axis=0)[0]

        # One choice at a time: a buffer of [R, T, H], not [R, T, K, H].
        picked = lax.map(one_choice, (jnp.moveaxis(dst_rows, 2, 0), ranks.T))
        return jnp.where(present[..., None], jnp.moveaxis(picked, 0, 1), 0)

    return _move_bits(send_back, expert_out, dst_rows, ranks, present), present


def _sum_by_choice(
    picked: jax.Array, present: jax.Array, topk_weights: jax.Array | None
) -> jax.Array:
    """float32 `[T, H]`: sum over k in order, weighted at the source."""
    terms = picked.astype(jnp.float32)
    if topk_weights is not None:
        weights = jnp.where(present, topk_weights, 0)
        terms = terms * weights[..., None]
    return _sum_in_order(terms, axis=1)


def _sum_by_rank(
    group: EPGroup, expert_out: jax.Array, dst_rows: jax.Array, row_weights: jax.Array
) -> jax.Array:
    """float32 `[T, H]`: sums per expert rank in k order, then over ranks in order."""
    weighted = expert_out.astype(jnp.float32) * row_weights[:, None]

    def add(sums: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        index = jnp.where(rows >= 0, rows, weighted.shape[0])
        return sums + _take(weighted, index), None

    zeros = jnp.zeros((*dst_rows.shape[:2], weighted.shape[1]), weighted.dtype)
    sums, _ = lax.scan(add, _like(zeros, weighted), jnp.moveaxis(dst_rows, 2, 0))
    parts = _all_to_all(sums.astype(expert_out.dtype), group)
    return _sum_in_order(parts.astype(jnp.float32), axis=0)


def _add_shared(
    out: jax.Array, expert_out: jax.Array, shared_rows: jax.Array
) -> jax.Array:
    """`out` `[T, H]`, and each token's row of the shared expert; -1 = none."""
    index = jnp.where(shared_rows >= 0, shared_rows, expert_out.shape[0])
    # A token without such a row keeps its -0.
    total = out.astype(jnp.float32) + _take(expert_out, index).astype(jnp.float32)
    return jnp.where((shared_rows >= 0)[:, None], total.astype(out.dtype), out)


def _sum_in_order(terms: jax.Array, axis: int) -> jax.Array:
    """Sum along an axis, first to last, from +0.

    A loop, so that XLA cannot fuse a product into the sum: a fused multiply-add rounds
    once, and the contract rounds twice.
    """
    terms = jnp.moveaxis(terms, axis, 0)
    zero = _like(jnp.zeros(terms.shape[1:], terms.dtype), terms)
    total = lax.scan(lambda total, term: (total + term, None), zero, terms)[0]
    # XLA drops "0 +" from a loop of one step; a sum from +0 is never -0, but +0.
    return total + lax.stop_gradient(jnp.where(total == 0, -total, zero))


def _like(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x`, varying over the mesh axes over which `other` varies."""
    missing = jax.typeof(other).mat.varying - jax.typeof(x).mat.varying
    return lax.pcast(x, tuple(missing), to="varying") if missing else x
