"""The results of dispatch, and calls in flight."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from jax_ep.config import EPConfig
from jax_ep.exchange.base import straight_through, without_gradient
from jax_ep.exchange.choices import count_choices
from jax_ep.exchange.drops import raise_on_drops
from jax_ep.exchange.operands import CombineOperands, DispatchOperands, DispatchResults, Routing
from jax_ep.exchange.payload import unpack
from jax_ep.exchange.routing import Choices
from jax_ep.exchange.rows import in_use, keep, keep_gradient, row_groups, row_sources
from jax_ep.formats import QuantizedFormat
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup, calls_of, check_group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, and what combine needs to return their results.

    A pytree; `group` is static. Rows are ordered by local expert, then source rank, then token
    index, then k: a function of `topk_ids` alone. Rows from `row_offsets[-1]` on are unspecified,
    unless `config.zero_unused_rows`. se is 1 with a fused shared expert, else 0; its rows, this
    rank's own tokens in order, are the first group. B = `config.expert_copies` groups come last,
    those of copies of other ranks' experts.

    `config.row_alignment` or the format may pad groups: `BlockwiseFP8` pads them to multiples of 4
    rows. Padding rows are at the end of their group, count as in use, and hold zeros.

    H is the size of the tokens given to dispatch, C the capacity of the call.

    Attributes:
        tokens: `[C, H]`, received rows in the token format's `row_dtype`; `[C, H / 2]` for packed
            formats.
        row_offsets: `uint32[L + se + B + 1]`, first row of each group; the last entry is the number
            of rows in use, padding included.
        expert_ids: `int32[L + se + B]`, 0 to L + se + B - 1: group i is local expert i - se or,
            from L + se on, copy i - L - se.
        src_info: `int32[C, 2]`, (token index on its source rank, k) of each row; (token index, -1)
            for a shared expert's rows, (-1, -1) for padding rows. Token indices are 0 to T - 1,
            also if tokens have several leading dimensions.
        n_dropped: `int32[]`, rows of tokens beyond the capacity.
        n_invalid: `int32[]`, ids in this rank's `topk_ids` outside `[-1, E)`; they sent nothing.
        topk_ids: `int32[..., K]`, with the leading dimensions given to dispatch. Ids beyond the
            range of int32 are clipped to it.
        copies: `int32[R, B]`, the global expert that each rank's copies are of, -1 for none; the
            same on all ranks of a node. None without `config.expert_copies`.
        group_ids: `int32[T, N]`, the group of each choice, for combine; None where it follows from
            `topk_ids`.
        handle: the transport's own, for combine.
        row_weights: `float32[C]`, the `topk_weights` that traveled with the tokens, or None. 1 for
            a shared expert's rows; combine ignores those.
        scales: dequantization scales in the token format's layout (docs/formats.md); None for
            unquantized formats.
        scales_offsets: `uint32[L + se + B]` for scales in 128 x 4 atoms: the scales of group i
            begin at block `row_offsets[i] // 128 + scales_offsets[i]`. None for other layouts.
        source_tokens: `[T, H]`, the tokens given to dispatch, flattened, which receive the gradient
            of `dequantize`; None for unquantized formats, and if they were `Quantized`.
        input_scale: `float32[]`, as given to dispatch, or None.
        group: the group that dispatched.
    """

    tokens: jax.Array
    row_offsets: jax.Array
    expert_ids: jax.Array
    src_info: jax.Array
    n_dropped: jax.Array
    n_invalid: jax.Array
    topk_ids: jax.Array
    copies: jax.Array | None
    group_ids: jax.Array | None
    handle: Any
    row_weights: jax.Array | None
    scales: jax.Array | None
    scales_offsets: jax.Array | None
    source_tokens: jax.Array | None
    input_scale: jax.Array | None
    group: EPGroup = dataclasses.field(metadata={"static": True})

    @property
    def group_sizes(self) -> jax.Array:
        """`int32[L + se + B]`, rows of each group, padding included.

        The form that `jax.lax.ragged_dot` takes.
        """
        return jnp.diff(self.row_offsets.astype(jnp.int32))

    @property
    def row_expert_ids(self) -> jax.Array:
        """`int32[C]`, the entry of `expert_ids` for each row; L + se + B for rows not in use.

        For parameters of which each expert has one, such as a bias: `results +
        bias[rows.row_expert_ids]`, with `bias` `[L + se + B, N]` (`fetch_experts`). JAX clamps an
        index beyond the last group, and gives it no gradient. Padding rows have the id of their
        group. Computed from `row_offsets`, on each use.
        """
        return row_groups(self.row_offsets, self.src_info.shape[0])

    @property
    def row_source_ranks(self) -> jax.Array:
        """`int32[C]`, the rank that each row's token is from; -1 for rows without a token.

        Rows without a token are padding rows and rows not in use. With `src_info`, this says which
        token a row belongs to. Communicates, on each use: an all-to-all of
        `int32[R, L + se + B]`, so all ranks must use it alike. With `skip_a2a` nothing travels: the
        rank is this one.

        Raises:
            ValueError: the group is closed, or this is outside `jax.shard_map`. While tracing.
        """
        check_group("row_source_ranks", self.group)
        geometry, routing = self.group.geometry, self.routing
        n_rows = self.src_info.shape[0]
        all_to_all = calls_of(self.group).all_to_all
        return row_sources(geometry, routing.group_ids, routing.row_offsets, n_rows, all_to_all)

    @property
    def expert_counts(self) -> jax.Array:
        """`int32[R, E]`, how many choices of each rank's tokens name each expert, dropped or not.

        The sum over ranks is the experts' load. Communicates, on each use: an all-gather of
        `int32[E]`, so all ranks must use it alike. With `skip_a2a` nothing travels: all ranks
        have the same tokens.

        Raises:
            ValueError: the group is closed, or this is outside `jax.shard_map`. While tracing.
        """
        check_group("expert_counts", self.group)
        config, n_ranks = self.group.config, self.group.n_ranks
        counts = count_choices(self.topk_ids, config.n_experts)
        if config.skip_a2a:
            return jnp.broadcast_to(counts, (n_ranks, config.n_experts))
        return calls_of(self.group).all_gather(counts)

    @property
    def routing(self) -> Routing:
        """Maps choices to rows."""
        return Routing.of(self.group.geometry, self)

    def combine_operands(
        self, operation: str, expert_out: Any, topk_weights: Any, residual: Any, reduce: Any
    ) -> CombineOperands:
        """The operands of a combine, checked."""
        geometry, routing, row_weights = self.group.geometry, self.routing, self.row_weights
        operands = CombineOperands.make(
            operation, geometry, expert_out, routing, topk_weights, row_weights, residual, reduce
        )
        if not geometry.config.zero_unused_rows:
            return operands
        kept = in_use(operands.routing.row_offsets, expert_out.shape[0])
        rows = keep_gradient(operands.expert_out, kept)
        return dataclasses.replace(operands, expert_out=rows)

    @classmethod
    def make(
        cls, group: EPGroup, choices: Choices, operands: DispatchOperands, results: DispatchResults
    ) -> Self:
        """From a transport's results."""
        config, topk_ids = group.config, choices.topk_ids
        if config.on_drop == "raise":
            topk_ids, results = _raise_on_drops(group, topk_ids, operands, results)
        if operands.is_packed:
            results = _unpacked(config, operands, results)
        src_info = results.src_info
        if config.fused_shared_expert:  # its rows belong to no choice of the router
            is_shared = src_info[:, 1:] == config.top_k
            src_info = jnp.where(is_shared & jnp.array([[False, True]]), -1, src_info)
            results = results._replace(src_info=src_info)
        if config.zero_unused_rows:
            results = _without_unused_rows(config, results)
        has_source = isinstance(operands.token_format, QuantizedFormat)
        if has_source:
            fixed: Any = jax.lax.stop_gradient((results.tokens, results.scales))
            call = group.geometry.call("dispatch")
            tokens, scales = without_gradient(call, operands.tokens, *fixed)
            results = results._replace(tokens=tokens, scales=scales)
        n_tokens = math.prod(topk_ids.shape[:-1])
        n_groups = group.geometry.routed.n_local_groups
        dispatched = cls(
            **results._asdict(),
            expert_ids=jnp.arange(n_groups, dtype=jnp.int32),
            topk_ids=topk_ids,
            copies=choices.copies,
            group_ids=None if choices.copies is None else operands.group_ids,
            scales_offsets=config.token_format.layout.offsets(results.row_offsets),
            source_tokens=operands.tokens[:n_tokens] if has_source else None,
            input_scale=operands.input_scale,
            group=group,
        )
        if has_source or config.token_format.returns_gradient:
            return dispatched
        # Another call returns the gradient of float16 rows.
        source_tokens, routing = operands.tokens[:n_tokens], dispatched.routing
        rows = straight_through(calls_of(group), source_tokens, dispatched.tokens, routing)
        return dataclasses.replace(dispatched, tokens=rows)


def _raise_on_drops(
    group: EPGroup, topk_ids: jax.Array, operands: DispatchOperands, results: DispatchResults
) -> tuple[jax.Array, DispatchResults]:
    """The values as given; nothing computed from them, such as combine, runs if rows drop."""
    call, capacity = group.geometry.call("dispatch"), operands.max_recv_tokens

    def describe(where: str, n_most: int) -> str:
        return (
            f"{call}: rows must fit into recv_capacity={capacity}; {where}. "
            f"{_advise(group.geometry, capacity, n_most)}, or balance the experts; with "
            'on_drop="count", they are only counted (docs/observe.md).'
        )

    all_gather = calls_of(group).all_gather
    zero = raise_on_drops(group.geometry, results.n_dropped, describe, all_gather)

    def gate(x: Any) -> Any:  # its gradient, too
        return None if x is None else jnp.where(zero == 0, x, jnp.zeros((), x.dtype))

    def add(x: jax.Array) -> jax.Array:
        return x + zero.astype(x.dtype)

    results = results._replace(
        tokens=gate(results.tokens),
        row_weights=gate(results.row_weights),
        row_offsets=add(results.row_offsets),
        n_dropped=add(results.n_dropped),
        handle=jax.tree.map(add, results.handle),
    )
    return add(topk_ids), results


def _advise(geometry: Geometry, capacity: int, n_dropped: int) -> str:
    """What makes room for so many rows, and for the padding of their groups."""
    config = geometry.config
    largest, alignment = config.worst_case_rows(geometry.n_ranks), config.group_alignment
    if capacity >= largest:
        return "It cannot be larger; let each token name an expert at most once"
    # Each block of `alignment` rows beyond the capacity has a dropped row; each group has less
    # padding than a block.
    padded = n_dropped + geometry.routed.n_local_groups * (alignment - 1)
    needed = min(n_dropped * alignment, -(-padded // alignment) * alignment)
    return f"Raise recv_capacity to {min(capacity + needed, largest)} or more"


def _unpacked(
    config: EPConfig, operands: DispatchOperands, results: DispatchResults
) -> DispatchResults:
    """The results with codes and scales in place of words."""
    token_format = config.token_format
    assert isinstance(token_format, QuantizedFormat)
    row_offsets = jax.lax.stop_gradient(results.row_offsets)
    rows = unpack(token_format, results.tokens, operands.hidden_size, row_offsets)
    return results._replace(tokens=rows.codes, scales=rows.scales)


def _without_unused_rows(config: EPConfig, results: DispatchResults) -> DispatchResults:
    """The arrays that have rows, zero in rows that are not in use; -1 in `src_info`."""
    row_offsets = jax.lax.stop_gradient(results.row_offsets)
    kept = in_use(row_offsets, results.src_info.shape[0])
    tokens, scales, weights = results.tokens, results.scales, results.row_weights
    src_info = jnp.where(kept, jax.lax.stop_gradient(results.src_info), -1)
    if scales is None:
        tokens = keep(tokens, kept)
    else:  # their gradient flows through `dequantize`
        tokens, scales = jax.lax.stop_gradient((tokens, scales))
        tokens = keep(tokens, kept)
        scales = keep(scales, config.token_format.layout.in_use(scales, row_offsets))
    if weights is not None:
        weights = keep(weights, kept[:, 0])
    return results._replace(tokens=tokens, src_info=src_info, row_weights=weights, scales=scales)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatch or combine that has started; pass it to the matching wait, once.

    Attributes:
        call: the transport's own.
        operands: `DispatchOperands` or `CombineOperands`.
        choices: `topk_ids`, as in `Dispatched`, and `copies`; None for combine.
        group: the group of the call; static.
    """

    call: Any
    operands: Any
    choices: Any
    group: EPGroup = dataclasses.field(metadata={"static": True})

    @property
    def operation(self) -> str:
        """`"dispatch"` or `"combine"`."""
        is_dispatch = isinstance(self.operands, DispatchOperands)
        return "dispatch" if is_dispatch else "combine"

    def then(self, x: Any) -> Any:
        """Orders work after the start of the call, so that the two overlap.

        Returns `x`, a pytree of arrays, with the same values and gradients. What is computed from
        it starts after all thread blocks of the call are resident on the GPU.
        """
        return self.call.then(x)

    def overlap(self, work: Callable[..., Any], *args: Any) -> Any:
        """Runs work that overlaps with the call, and its backward with that of the call.

        The forward is like `y = work(*in_flight.then(args))` and a wait after `y`. The backward is
        the same in reverse: the backward of the call starts, also asynchronously; then that of
        `work` runs; and the wait for the gradients of the call's operands comes after the gradients
        of `args` are computed. For use before the wait, in the function that started the call;
        elsewhere, and for a dispatch of float16 or in a format that quantizes, the call's backward
        is synchronous.

        Args:
            work: a function of `args`; it may close over other arrays, such as weights.
            args: pytrees of arrays. The work is ordered by them: what it computes from other arrays
                alone may come before the call.

        Returns:
            `work(*args)`, with the same values and gradients.

        Raises:
            ValueError: on `p2p`, `in_flight` is from another function and not an argument of this
                one. While tracing.
        """
        return self.call.run(work, args)


def check_dispatched(operation: str, dispatched: Any, group: EPGroup | None = None) -> None:
    """Requires the result of a dispatch; with `group`, of that group."""
    if not isinstance(dispatched, Dispatched):
        raise TypeError(
            f"{operation}: dispatched must be the result of dispatch; got "
            f"{type(dispatched).__name__}."
        )
    if group is not None:
        _check_same_group(operation, "dispatched", dispatched.group, group)


def check_in_flight(operation: str, in_flight: Any, group: EPGroup) -> None:
    """Requires the result of `{operation}_async` of the group."""
    wait = group.geometry.call(f"{operation}_wait")
    if not isinstance(in_flight, InFlight) or in_flight.operation != operation:
        got = type(in_flight).__name__
        if isinstance(in_flight, InFlight):
            got = f"that of {in_flight.operation}_async"
        raise TypeError(f"{wait}: in_flight must be the result of {operation}_async; got {got}.")
    _check_same_group(wait, "in_flight", in_flight.group, group)


def _check_same_group(operation: str, name: str, theirs: EPGroup, group: EPGroup) -> None:
    if theirs != group:
        raise ValueError(
            f"{operation}: {name} must come from this group, {group.key}; it comes from "
            f"{theirs.key}."
        )
